"""The one MLX thread, and the only room that imports mlx."""

from mlxstack.engine.attention import install

install()
