"""Doors: the protocols by which clients speak to the service."""
