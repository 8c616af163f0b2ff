"""Tensor parallel: one model on several ranks; rank 0 decides, the others repeat its operations."""
