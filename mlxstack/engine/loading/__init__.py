"""Weights, towers and tokenizers of model folders and of the hub."""
