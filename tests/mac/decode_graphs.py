"""Graphs of decode steps as on a GPU, of models with real numbers of layers and tiny widths."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import yaml
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import gated_delta
from mlx_lm.utils import _get_classes
from msgspec import Struct

from mlxstack.bench.dev.in_process.contestants import Ours, Theirs, filled
from mlxstack.core.request import SamplingParams
from mlxstack.engine.decode import attention_patch, batch
from mlxstack.engine.model import cpu_attention
from mlxstack.engine.model.compiled_experts import expert_blocks
from tests.mac.dispatch_counts import Operation, graph_of, tape_of

PRESETS = Path(__file__).parents[2] / "presets"
N_STEPS_BEFORE = 2
"""Steps until recurrent states of the rows are stacked and nothing is built but the next step."""
N_TOKENS = 40
"""Tokens of the first row; each other one has one more."""

ONE_NODE = "Depends"
"""Kind of the node that stands for a fused kernel."""

N_NAMED = 1000
"""Weights that have names in a graph; a call takes 1,024 of them."""
STATE = ("num_value_heads", "key_head_dim", "value_head_dim")
"""Fields of a config whose product are the elements of a recurrent state."""

GROUP_SIZE = 64

TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "vocab_size": 512,
}
DENSE = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
"""A dense model of 4 billion weights whose layers all have attention: Qwen3 4B."""


class StepModel(Struct, frozen=True):
    """A model by its real config, and the sampling of its preset without penalties."""

    name: str
    config: dict[str, Any]
    sampling: SamplingParams


class TinyModel(Struct, frozen=True):
    """A model of tiny widths, and elements of the real one's largest weights by name."""

    model: Any
    real: StepModel
    sizes: dict[str, int]


def _of_preset(name: str) -> StepModel:
    config = json.loads((PRESETS / "configs" / f"{name}.json").read_text())
    config.pop("vision_config", None)
    rules = yaml.safe_load((PRESETS / f"{name}.yaml").read_text())["sampling"]
    sampling = SamplingParams(**{rule: rules[rule] for rule in ("temperature", "top_p", "top_k")})
    return StepModel(name, config, sampling)


MODELS = {
    model.name: model
    for model in (
        _of_preset("qwen3.6-35b-a3b"),
        _of_preset("qwen3.5-4b"),
        StepModel("dense 4B", DENSE, SamplingParams(temperature=0.7, top_p=0.8, top_k=20)),
        _of_preset("qwen3-coder-30b-a3b"),
    )
}


def build(real: StepModel) -> TinyModel:
    """Model of as many layers as the real one, in 4 bits, computed."""
    model = _quantized(real.config, TINY)
    mx.eval(model.parameters())
    parameters = tree_flatten(_quantized(real.config, {}).parameters())
    largest = sorted(parameters, key=lambda pair: -pair[1].size)[:N_NAMED]
    return TinyModel(model, real, {name: array.size for name, array in largest})


def step_of(
    side: Ours | Theirs, model: TinyModel, n_before: int = N_STEPS_BEFORE
) -> list[Operation]:
    """Operations of one decode step in MLX's order; weights with a size have their names."""
    weights = {k: a for k, a in tree_flatten(model.model.parameters()) if k in model.sizes}
    tapes: list[list[Operation]] = []

    def recording(evaluate: Any) -> Any:
        def record(*values: Any) -> None:
            arrays = [a for _, a in tree_flatten(values) if isinstance(a, mx.array)]
            tapes.append(tape_of(graph_of(arrays, weights)))
            evaluate(*values)

        return record

    for _ in range(n_before):
        side.step()
    side.finish()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("eval", "async_eval"):
            patch.setattr(mx, name, recording(getattr(mx, name)))
        side.step()
    side.finish()
    return [op for tape in tapes for op in tape]


def compile_experts(model: TinyModel, n_rows: Sequence[int]) -> bool:
    """Compile the blocks of experts for steps of so many rows; False if there are none."""
    blocks = expert_blocks(model.model)
    for block in blocks:
        block.compile_for(frozenset((mx.float32, (n, 1)) for n in n_rows))
    return bool(blocks)


def rows_of(model: TinyModel, n_rows: int) -> list[list[Any]]:
    """Caches of rows of different lengths."""
    return [filled(model.model, N_TOKENS + i, seed=i) for i in range(n_rows)]


def input_sizes(
    tape: Sequence[Operation], model: TinyModel, n_rows: int, n_keys: int
) -> dict[str, int]:
    """Elements of weights, of KV of `n_keys` tokens per row, and of recurrent states.

    Other results of a step are small and left out.
    """
    shape = model.real.config.get("text_config", model.real.config)
    n_kv = n_keys * shape["num_key_value_heads"] * shape["head_dim"]
    n_state = n_rows * prod(shape.get(f"linear_{name}", 0) for name in STATE)
    sizes = dict(model.sizes)
    for op in tape:
        if op.kind == "SliceUpdate":
            sizes[op.inputs[0]] = n_kv
        elif op.kind == ONE_NODE and len(op.outputs) == 2:
            sizes |= {op.inputs[1]: n_state, op.outputs[1]: n_state}
    return sizes


@contextmanager
def fused_kernels() -> Iterator[None]:
    """Replace what is one kernel on a GPU, and several operations on a CPU, by one node each."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention_patch, batch, cpu_attention):
            patch.setattr(module, "has_gpu", lambda: True)
        patch.setattr(mx.fast, "scaled_dot_product_attention", _attention)
        patch.setattr(mx.fast, "rms_norm", _norm)
        patch.setattr(mx.fast, "rope", _rope)
        patch.setattr(mx, "dequantize", _dequantize)
        patch.setattr(gated_delta, "gated_delta_ops", _gated_delta)
        yield


def _attention(queries: mx.array, keys: mx.array, values: mx.array, **_: Any) -> mx.array:
    return _one_node(queries, keys, values)


def _norm(x: mx.array, weight: mx.array | None, *_: Any) -> mx.array:
    return _one_node(x, *([] if weight is None else [weight]))


def _rope(x: mx.array, *_: Any, offset: Any = 0, **__: Any) -> mx.array:
    return _one_node(x, *([offset] if isinstance(offset, mx.array) else []))


def _dequantize(weight: mx.array, scales: mx.array, biases: mx.array, **kind: Any) -> mx.array:
    shape = (*weight.shape[:-1], weight.shape[-1] * 32 // kind["bits"])
    return _one_node(mx.array(np.zeros(shape, np.float32)), weight, scales, biases)


def _gated_delta(
    q: mx.array, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: mx.array, *_: Any
) -> tuple[mx.array, ...]:
    return tuple(mx.depends([v, state], [q, k, g, beta]))


def _one_node(like: mx.array, *inputs: mx.array) -> mx.array:
    """Array like the first one, by one node that reads all."""
    (output,) = mx.depends([like], [*inputs])
    return output


def _quantized(config: dict[str, Any], sizes: dict[str, int]) -> Any:
    """Model of this config with other sizes, lazily."""
    text = {key: sizes.get(key, n) for key, n in config.get("text_config", config).items()}
    model_class, args_class = _get_classes(config)
    whole = {**config, "text_config": text} if "text_config" in config else text
    model = model_class(args_class.from_dict(whole))
    nn.quantize(model, GROUP_SIZE, class_predicate=_can_quantize)
    return model.eval()


def _can_quantize(_: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % GROUP_SIZE == 0
