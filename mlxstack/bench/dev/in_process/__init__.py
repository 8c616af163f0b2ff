"""Measures bare arrays and whole engines in process; run by the benchmark as a child."""
