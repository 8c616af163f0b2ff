"""Shared vocabulary as frozen values."""
