"""Ring of all ranks, and the part of a model on each."""

import json
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlxstack.core.errors import SetupError, Unsupported
from mlxstack.engine.model.model_shape import division_of
from mlxstack.policy.memory.capacity import Division, stages

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


def divide(group: Any, name: str, model: Any) -> None:
    """Divide a model, and keep the part of this rank. Raises SetupError."""
    division = division_of(model)
    if division is Division.NONE:
        raise SetupError(
            f"mlx-lm cannot divide {name} between several machines (its model file has no "
            "`shard`); remove `hosts`"
        )
    try:
        (_keep_stage if division is Division.PIPELINE else _keep_shard)(model, group)
    except (Unsupported, ValueError, AssertionError, AttributeError, TypeError) as error:
        raise SetupError(
            f"{name} cannot be divided between {group.size()} machines: {error}"
        ) from error


def _keep_shard(model: Any, group: Any) -> None:
    """Keep a part of every layer. Raises Unsupported."""
    for _, module in model.named_modules():
        for key in HEADS:
            n_heads = getattr(module, key, None)
            # mlx-lm would cut through a head without a word.
            if isinstance(n_heads, int) and n_heads % group.size():
                raise Unsupported(f"it has {n_heads} heads ({key}) in a layer")
    model.shard(group)


def _keep_stage(model: Any, group: Any) -> None:
    """Keep some of the layers. Raises Unsupported."""
    kinds = [type(cache).__name__ for cache in make_prompt_cache(model)]
    model.model.pipeline(group, split=[len(part) for part in stages(kinds, group.size())])
    layers = type(model.model)

    def call(self: Any, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """States of the last layer, evaluated.

        What is sent and received is in the order of the passes then, on all ranks.
        """
        # Instead of None mlx-lm would change the last cache, which need not be one of its own.
        states: mx.array = layers.__call__(self, tokens, [*cache, None])
        mx.eval(states)
        return states

    model.model.__class__ = type(layers.__name__, (layers,), {"__call__": call})
