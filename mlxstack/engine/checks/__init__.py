"""Checks and measurements of MLX's kernels with the shapes of a model."""
