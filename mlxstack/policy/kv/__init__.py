"""Prefix index, reuse, retention and eviction, without arrays."""
