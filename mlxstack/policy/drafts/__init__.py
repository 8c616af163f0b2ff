"""Governors of draft lengths."""
