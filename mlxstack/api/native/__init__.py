"""The llama-server dialect and our own endpoints."""
