"""Services of this machine: start, watch, switch."""
