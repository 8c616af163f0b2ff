"""Tokenizers and special tokens."""
