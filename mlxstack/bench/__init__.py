"""Measures a running service through the client."""
