"""Protections switched off one by one, to see that a test fails for each."""
