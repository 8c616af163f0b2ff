"""API dialects: the protocols that clients use."""
