"""Shapes of a model's kernel calls, recorded from two passes."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from msgspec import Struct

N_PROMPT = 16
"""Tokens of the pass that stands for prefill; another one stands for decode."""

LINEAR = (nn.QuantizedLinear, nn.Linear, nn.QuantizedEmbedding, nn.Embedding)
"""Layers, and embeddings that may be the head."""
EXPERTS = (QuantizedSwitchLinear, SwitchLinear)


class AttentionShape(Struct, frozen=True):
    """Heads and dims of an attention call."""

    n_heads: int
    n_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    is_decode: bool
    is_biased: bool
    """Whether its mask has numbers."""
    has_sinks: bool

    def __str__(self) -> str:
        dims = f"{self.key_dim}" if self.is_square else f"{self.key_dim} and {self.value_dim}"
        return f"{self.n_heads} heads over {self.n_kv_heads} of dim {dims}"

    @property
    def is_square(self) -> bool:
        """Whether keys and values have the same dim."""
        return self.key_dim == self.value_dim


class RopeCall(Struct, frozen=True):
    """Arguments of `mx.fast.rope`, and heads and dim of its input."""

    n_heads: int
    head_dim: int
    dtype: mx.Dtype
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.n_heads} heads of dim {self.head_dim}, {self.arguments['dims']} rotated"


class DeltaCall(Struct, frozen=True):
    """Arguments of a gated delta update."""

    update: Callable[..., tuple[mx.array, mx.array]]
    arrays: tuple[mx.array, ...]
    """q, k, v, a, b (1, tokens, ...), A_log and dt_bias."""
    options: dict[str, Any]

    def __str__(self) -> str:
        keys = self.arrays[1]
        values = self.arrays[2]
        return (
            f"{keys.shape[2]} key heads of dim {keys.shape[3]}, "
            f"{values.shape[2]} value heads of dim {values.shape[3]}"
        )


class LayerShape(Struct, frozen=True):
    """Shape and storage of a layer; bits 0: not quantized."""

    n_inputs: int
    n_outputs: int
    bits: int
    group_size: int = 0
    mode: str = ""
    n_experts: int = 0

    def __str__(self) -> str:
        parts = [f"{self.n_inputs} x {self.n_outputs}", "not quantized"]
        if self.bits:
            parts[1:] = [f"{self.bits} bits", self.mode, f"group {self.group_size}"]
        if self.n_experts:
            parts.insert(0, f"{self.n_experts} experts")
        return ", ".join(parts)


class ModelShapes(Struct, frozen=True):
    """Distinct kernel calls of a model, and modules by layer shape."""

    dtype: mx.Dtype
    attention: tuple[AttentionShape, ...]
    ropes: tuple[RopeCall, ...]
    deltas: tuple[DeltaCall, ...]
    linear: dict[LayerShape, Any]
    experts: dict[LayerShape, Any]
    n_unchecked: dict[str, int]
    """Quantized layers without a check, by class."""


def shapes_of(model: Any) -> ModelShapes:
    """Record a short prefill and a decode step of a model."""
    recorder = _Recorder()
    caches = make_prompt_cache(model)
    with recorder.installed():
        for n_tokens in (N_PROMPT, 1):
            mx.eval(model(mx.zeros((1, n_tokens), mx.int32), cache=caches))
    linear: dict[LayerShape, Any] = {}
    experts: dict[LayerShape, Any] = {}
    unchecked: dict[str, int] = {}
    for _, module in model.named_modules():
        kind = type(module)
        if kind in EXPERTS:
            experts.setdefault(layer_shape(module), module)
        elif kind in LINEAR:
            linear.setdefault(layer_shape(module), module)
        elif "scales" in module:
            unchecked[kind.__name__] = unchecked.get(kind.__name__, 0) + 1
    dtype = next((shape.dtype for shape in recorder.attention), mx.float32)
    return ModelShapes(
        dtype=dtype,
        attention=tuple(recorder.attention),
        ropes=tuple(recorder.ropes.values()),
        deltas=tuple(recorder.deltas.values()),
        linear=linear,
        experts=experts,
        n_unchecked=unchecked,
    )


def layer_shape(module: Any) -> LayerShape:
    """Shape of a linear layer, embedding or stack of experts."""
    *experts, n_outputs, n_stored = module.weight.shape
    n_experts = experts[0] if experts else 0
    if "scales" not in module:
        return LayerShape(n_stored, n_outputs, 0, n_experts=n_experts)
    n_inputs = n_stored * 32 // module.bits
    return LayerShape(n_inputs, n_outputs, module.bits, module.group_size, module.mode, n_experts)


class _Recorder:
    """Distinct calls, in the order of the first of each."""

    def __init__(self) -> None:
        self.attention: dict[AttentionShape, None] = {}
        self.ropes: dict[tuple[Any, ...], RopeCall] = {}
        self.deltas: dict[str, DeltaCall] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Record the calls of mlx-lm's model files meanwhile."""
        with ExitStack() as patches:
            patches.enter_context(_watched(mx.fast, "rope", self._rope))
            for module in list(sys.modules.values()):
                if getattr(module, "__name__", "").startswith("mlx_lm.models."):
                    for name, record in (
                        ("scaled_dot_product_attention", self._attend),
                        ("gated_delta_update", self._delta),
                    ):
                        if hasattr(module, name):
                            patches.enter_context(_watched(module, name, record))
            yield

    def _attend(
        self,
        _: Callable[..., Any],
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        sinks: mx.array | None = None,
    ) -> None:
        if not isinstance(keys, mx.array):
            return
        is_biased = isinstance(mask, mx.array) and mask.dtype != mx.bool_
        shape = AttentionShape(
            n_heads=queries.shape[1],
            n_kv_heads=keys.shape[1],
            key_dim=keys.shape[3],
            value_dim=values.shape[3],
            dtype=queries.dtype,
            is_decode=queries.shape[2] == 1,
            is_biased=is_biased,
            has_sinks=sinks is not None,
        )
        self.attention[shape] = None

    def _rope(self, _: Callable[..., Any], x: mx.array, dims: int, **options: Any) -> None:
        if x.ndim != 4:
            return
        arguments = {"dims": dims, **options}
        del arguments["offset"]
        key = (x.shape[1], x.shape[3], *(_hashable(value) for value in arguments.values()))
        self.ropes.setdefault(key, RopeCall(x.shape[1], x.shape[3], x.dtype, arguments))

    def _delta(self, update: Callable[..., Any], *arrays: mx.array, **options: Any) -> None:
        n_inputs = 7
        options = {name: options[name] for name in options if name not in ("state", "mask")}
        options.pop("use_kernel", None)
        call = DeltaCall(update, tuple(arrays[:n_inputs]), options)
        if len(call.arrays) == n_inputs:
            self.deltas.setdefault(str(call), call)


def _hashable(value: Any) -> Any:
    return id(value) if isinstance(value, mx.array) else value


@contextmanager
def _watched(owner: Any, name: str, record: Callable[..., None]) -> Iterator[None]:
    """Record the arguments of each call of a function."""
    original = getattr(owner, name)

    def watched(*values: Any, **options: Any) -> Any:
        record(original, *values, **options)
        return original(*values, **options)

    setattr(owner, name, watched)
    try:
        yield
    finally:
        setattr(owner, name, original)
