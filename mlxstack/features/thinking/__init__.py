"""Bounds and effort of reasoning where a client sets none."""
