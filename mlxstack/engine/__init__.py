"""The one MLX thread, and the only room that imports mlx."""
