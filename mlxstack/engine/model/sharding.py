"""Ring of all ranks, and the shard of a model."""

import json
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxstack.core.errors import SetupError

HEADS = (
    "n_heads",
    "n_kv_heads",
    "num_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "num_k_heads",
    "num_v_heads",
)
"""Names by which layers of mlx-lm call their numbers of heads."""


def join_ring(rank: int, hosts: Sequence[str]) -> Any:
    """Join the ring of all ranks, and wait for the others.

    A process joins one ring at most. MLX reads rank and addresses from the environment.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump([[host] for host in hosts], file)
        file.flush()
        os.environ |= {"MLX_RANK": str(rank), "MLX_HOSTFILE": file.name}
        return mx.distributed.init(strict=True, backend="ring")


def shard(model: Any, group: Any, name: str) -> None:
    """Divide a model, and keep the shard of this rank. Raises SetupError."""
    if not hasattr(model, "shard"):
        raise SetupError(
            f"mlx-lm cannot divide {name} between several machines (its model file has no "
            "`shard`); remove `hosts`"
        )
    refusal = f"{name} cannot be divided between {group.size()} machines: "
    for _, module in model.named_modules():
        for key in HEADS:
            n_heads = getattr(module, key, None)
            # mlx-lm would cut through a head without a word.
            if isinstance(n_heads, int) and n_heads % group.size():
                raise SetupError(f"{refusal}it has {n_heads} heads ({key}) in a layer")
    try:
        model.shard(group)
    except (ValueError, AssertionError, AttributeError, TypeError) as error:
        raise SetupError(f"{refusal}{error}") from error
