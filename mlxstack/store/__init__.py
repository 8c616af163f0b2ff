"""Disk, bytes only."""
