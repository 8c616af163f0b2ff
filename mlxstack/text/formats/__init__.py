"""Output formats, derived from chat templates or listed by family."""
