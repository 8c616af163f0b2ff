"""Developers' benchmarks, run from a checkout; the wheel leaves them out."""
