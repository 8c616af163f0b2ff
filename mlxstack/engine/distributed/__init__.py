"""Tensor parallel: rank 0 schedules, the other ranks repeat its operations."""
