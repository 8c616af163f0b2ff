"""Many coding agents, one model, one machine."""

__version__ = "0.1.0"
