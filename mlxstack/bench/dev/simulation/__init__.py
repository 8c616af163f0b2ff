"""Simulated agents and hardware, served by the real scheduler."""
