"""The one MLX thread, and the only room that imports mlx."""

from mlxstack.engine.model.attention_patch import install

install()
