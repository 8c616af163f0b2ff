"""Models on several ranks: rank 0 schedules, the other ranks repeat its operations."""
