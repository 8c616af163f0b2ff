"""Jinja templates rendered in a limited process."""
