"""Collaborators that a service holds."""
