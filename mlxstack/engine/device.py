"""What MLX computes on."""

import mlx.core as mx


def has_gpu() -> bool:
    """Whether MLX computes on a GPU here."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)
