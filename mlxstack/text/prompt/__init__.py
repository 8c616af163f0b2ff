"""Prompts of conversations."""
