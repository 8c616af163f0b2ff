"""Decisions, pure: no clock, no thread, no array."""
