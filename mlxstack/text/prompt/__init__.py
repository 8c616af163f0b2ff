"""Prompts of conversations, and replay of sampled answers."""
