"""Typed calls to a running service."""
