"""KV geometry and memory budgets."""
