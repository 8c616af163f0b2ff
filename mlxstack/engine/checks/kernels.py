"""Checks of the device's kernels against float32 on a CPU.

They have the shapes of a loaded model. `verify` compares answers of a device with answers of the
same device: a kernel that is wrong for all of them passes there. Faults begin where MLX changes its
kernel, so the sizes lie on both sides of such points: attention of a few queries splits its keys
from 1,024 keys on (Max and Ultra) or 4,096 (grouped queries elsewhere), and more than 8 queries
take another kernel; quantized products take another one from 2 and from 6 to 13 rows on; experts
are sorted from 64 pairs on.
"""

from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn
from msgspec import Struct

from mlxstack.engine.checks.model_shapes import (
    AttentionShape,
    DeltaCall,
    LayerShape,
    ModelShapes,
    RopeCall,
    shapes_of,
)
from mlxstack.engine.device import has_gpu
from mlxstack.engine.device_errors import device_error

KEY_COUNTS = (1023, 1024, 4095, 4096, 8192, 32768)
QUERY_COUNTS = (1, 2, 8)
PREFILL_QUERIES = (8, 9, 512, 1024)
N_BEFORE = 1024
"""Keys before those of the prefill queries."""
MAX_PREFILL_HEADS = 32
"""Query heads of a prefill check; the scores of more would take gigabytes on the CPU."""
ROW_COUNTS = (1, 2, 5, 6, 13, 32)
PAIR_COUNTS = (8, 64, 512)
"""Pairs of a row and an expert; mlx-lm sorts 64 and more."""
ROPE_OFFSETS = (0, 1023, 4096, 32767)
DELTA_TOKENS = (1, 8, 64)
MIN_DEVIATION = 1e-2
"""Of all numbers: rows that are nearly zero count as so large."""
BLOCK = 1 << 25
"""Numbers of a matrix that are unpacked at once."""


class Tolerance(Struct, frozen=True):
    """Allowed difference in standard deviations of a reference row, and why."""

    deviations: float
    reason: str


N_ROUNDINGS = 48
"""Roundings that a difference may come to.

A CPU that rounds each score, probability, weight and sum to half precision comes to 26.
"""
HALF = f"{N_ROUNDINGS} times the rounding of {{}}, for scores, weights and sums"
TOLERANCES = {
    mx.bfloat16: Tolerance(N_ROUNDINGS * 2**-8, HALF.format("bfloat16")),
    mx.float16: Tolerance(N_ROUNDINGS * 2**-11, HALF.format("float16")),
}
ON_GPU = Tolerance(N_ROUNDINGS * 2**-11, "a GPU may compute products of float32 in TF32")
ON_CPU = Tolerance(1e-4, "sums of float32 in another order")


class KernelOutcome(StrEnum):
    """Outcome of a check; UNAVAILABLE is no fault: MLX has another kernel."""

    OK = "ok"
    FAILED = "failed"
    MISSING = "missing"
    UNAVAILABLE = "unavailable"


class KernelCheck(Struct, frozen=True):
    """Largest difference of a kernel, in standard deviations of a reference row."""

    name: str
    shape: str
    dtype: str
    outcome: KernelOutcome
    difference: float = 0.0
    tolerance: float = 0.0
    reason: str = ""
    detail: str = ""

    @property
    def is_fault(self) -> bool:
        """Whether a wrong result or a missing kernel was found."""
        return self.outcome in (KernelOutcome.FAILED, KernelOutcome.MISSING)


def check_kernels(model: Any) -> Iterator[KernelCheck]:
    """Check all kernels of a loaded model, one after the other."""
    shapes = shapes_of(model)
    for attention in shapes.attention:
        yield from _attention_checks(attention)
    for layer, module in shapes.linear.items():
        yield from _linear_checks(layer, module, shapes.dtype)
    for layer, module in shapes.experts.items():
        yield from _expert_checks(layer, module, shapes.dtype)
    for rope in shapes.ropes:
        yield from _rope_checks(rope)
    for delta in shapes.deltas:
        yield from _delta_checks(delta)
    yield from _unchecked(shapes)


def _attention_checks(shape: AttentionShape) -> Iterator[KernelCheck]:
    if shape.is_decode:
        for n_keys in KEY_COUNTS:
            for n_queries in QUERY_COUNTS:
                yield from _attend(shape, n_queries, n_keys, is_forced=False)
        return
    for n_queries in PREFILL_QUERIES:
        for is_forced in (False, True):
            yield from _attend(shape, n_queries, N_BEFORE + n_queries, is_forced=is_forced)


def _attend(
    shape: AttentionShape, n_queries: int, n_keys: int, *, is_forced: bool
) -> Iterator[KernelCheck]:
    """Compare attention of the last queries of `n_keys`."""
    attend: Any = mx.fast.scaled_dot_product_attention
    n_kv = shape.n_kv_heads
    n_heads = shape.n_heads
    if not shape.is_decode and n_heads > MAX_PREFILL_HEADS:
        n_kv = max(1, n_kv * MAX_PREFILL_HEADS // n_heads)
        n_heads = n_kv * (shape.n_heads // shape.n_kv_heads)
    queries = _random((1, n_heads, n_queries, shape.key_dim), shape.dtype, 0)
    keys = _random((1, n_kv, n_keys, shape.key_dim), shape.dtype, 1)
    values = _random((1, n_kv, n_keys, shape.value_dim), shape.dtype, 2)
    # The last value is as large as the sum of all others, so that a key too few shows.
    values[..., -1, :] *= n_keys**0.5
    mask: Any = "causal" if n_queries > 1 else None
    if shape.is_biased:
        bias = _random((1, n_heads, n_queries, n_keys), shape.dtype, 3)
        mask = mx.where(_causal(n_queries, n_keys), bias, -1e9).astype(shape.dtype)
    sinks = _random((n_heads,), shape.dtype, 4) if shape.has_sinks else None
    # Scores of deviation 1, whatever the model's own scale.
    compute = partial(attend, queries, keys, values, scale=shape.key_dim**-0.5)

    def reference() -> mx.array:
        expected: mx.array = attend(
            *map(_wide, (queries, keys, values)),
            **compute.keywords,
            mask=_wide(mask) if shape.is_biased else mask,
            sinks=None if sinks is None else _wide(sinks),
            stream=mx.cpu,
        )
        return expected

    forced = {"force_fused": True} if is_forced else {}
    yield _checked(
        "attention, forced" if is_forced else "attention",
        f"queries {n_queries:,}, keys {n_keys:,}; {shape}",
        shape.dtype,
        partial(compute, mask=mask, sinks=sinks, **forced),
        reference,
        is_optional=is_forced,
    )


def _causal(n_queries: int, n_keys: int) -> mx.array:
    """Causal mask (queries, keys) of the last queries."""
    positions = mx.arange(n_keys - n_queries, n_keys)
    return mx.arange(n_keys)[None] <= positions[:, None]


def _linear_checks(shape: LayerShape, module: Any, dtype: mx.Dtype) -> Iterator[KernelCheck]:
    inputs = _random((max(ROW_COUNTS), 1, shape.n_inputs), dtype, 0)
    if isinstance(module, nn.QuantizedEmbedding | nn.Embedding):
        compute = module.as_linear
    else:
        compute = module
    expected = _product(inputs, module)
    for n_rows in ROW_COUNTS:
        yield _checked(
            "quantized layer" if shape.bits else "linear layer",
            f"rows {n_rows}; {shape}",
            dtype,
            partial(compute, inputs[:n_rows]),
            partial(expected.__getitem__, slice(n_rows)),
            rows=True,
        )


def _product(inputs: mx.array, module: Any) -> mx.array:
    """Product (rows, 1, out) of a layer in float32 on the CPU."""
    n_outputs = module.weight.shape[0]
    n_block = max(1, BLOCK // inputs.shape[-1])
    with mx.stream(mx.cpu):
        wide = _wide(inputs)
        blocks = []
        for start in range(0, n_outputs, n_block):
            block = wide @ _weights(module, slice(start, start + n_block)).T
            mx.eval(block)
            blocks.append(block)
        product = mx.concatenate(blocks, axis=-1)
        if "bias" in module:
            product += _wide(module.bias)
        mx.eval(product)
    return product


def _weights(module: Any, outputs: slice) -> mx.array:
    """Float32 weights (outputs, inputs) of some outputs, on the current stream."""
    if "scales" not in module:
        return _wide(module.weight[outputs])
    biases = module.get("biases")
    return mx.dequantize(
        module.weight[outputs],
        _wide_scales(module.scales[outputs]),
        None if biases is None else _wide(biases[outputs]),
        module.group_size,
        module.bits,
        module.mode,
        module.get("global_scale"),
        dtype=mx.float32,
    )


def _wide_scales(scales: mx.array) -> mx.array:
    """Scales in float32, but for those that are bytes."""
    return scales if scales.dtype == mx.uint8 else _wide(scales)


def _expert_checks(shape: LayerShape, module: Any, dtype: mx.Dtype) -> Iterator[KernelCheck]:
    for n_pairs in PAIR_COUNTS:
        for is_sorted in (False, True):
            chosen = mx.random.randint(0, shape.n_experts, (n_pairs,), key=mx.random.key(5))
            if is_sorted:
                chosen = mx.sort(chosen)
            inputs = _random((n_pairs, 1, shape.n_inputs), dtype, 0)
            mx.eval(chosen)
            name = "experts, sorted" if is_sorted else "experts"
            yield _checked(
                name,
                f"pairs {n_pairs}; {shape}",
                dtype,
                partial(module, inputs, chosen, sorted_indices=is_sorted),
                partial(_expert_product, module, inputs, chosen),
                rows=True,
            )


def _expert_product(module: Any, inputs: mx.array, chosen: mx.array) -> mx.array:
    """Product (pairs, 1, out) of experts in float32 on the CPU."""
    with mx.stream(mx.cpu):
        if "scales" not in module:
            weights = _wide(module.weight).swapaxes(-1, -2)
            product = mx.gather_mm(_wide(inputs), weights, rhs_indices=chosen)
        else:
            biases = module.get("biases")
            product = mx.gather_qmm(
                _wide(inputs),
                module.weight,
                _wide_scales(module.scales),
                None if biases is None else _wide(biases),
                rhs_indices=chosen,
                transpose=True,
                group_size=module.group_size,
                bits=module.bits,
                mode=module.mode,
                global_scale=module.get("global_scale"),
            )
        if "bias" in module:
            product += mx.expand_dims(_wide(module.bias)[chosen], -2)
        mx.eval(product)
    return product


def _rope_checks(call: RopeCall) -> Iterator[KernelCheck]:
    single: list[tuple[int, int, Any]] = [(1, 1, offset) for offset in ROPE_OFFSETS]
    together = [(1, 512, 1024), (2, 1, mx.array([5, 4096]))]
    for n_rows, n_tokens, offset in [*single, *together]:
        inputs = _random((n_rows, call.n_heads, n_tokens, call.head_dim), call.dtype, 0)
        where = offset.tolist() if isinstance(offset, mx.array) else f"{offset:,}"
        rotate = partial(mx.fast.rope, offset=offset, **call.arguments)
        yield _checked(
            "rope",
            f"tokens {n_tokens} at {where}; {call}",
            call.dtype,
            partial(rotate, inputs),
            partial(rotate, _wide(inputs), stream=mx.cpu),
        )


def _delta_checks(call: DeltaCall) -> Iterator[KernelCheck]:
    *_, decay, bias = call.arrays
    for n_tokens in DELTA_TOKENS:
        inputs = [
            _random((1, n_tokens, *array.shape[2:]), array.dtype, seed)
            for seed, array in enumerate(call.arrays[:5])
        ]
        for i in range(2):
            norm = mx.linalg.norm(_wide(inputs[i]), axis=-1, keepdims=True)
            inputs[i] = (inputs[i] / norm).astype(inputs[i].dtype)
        mx.eval(inputs)

        def reference(inputs: list[mx.array] = inputs) -> mx.array:
            with mx.stream(mx.cpu):
                wide = map(_wide, (*inputs, decay, bias))
                outputs = call.update(*wide, **call.options, use_kernel=False)
                return _flat(*outputs)

        def compute(inputs: list[mx.array] = inputs) -> mx.array:
            return _flat(*call.update(*inputs, decay, bias, **call.options))

        shape = f"tokens {n_tokens}; {call}"
        yield _checked("gated delta", shape, inputs[0].dtype, compute, reference)


def _flat(output: mx.array, state: mx.array) -> mx.array:
    """Output and state of a gated delta update as one row."""
    return mx.concatenate([_wide(output).flatten(), _wide(state).flatten()])


def _unchecked(shapes: ModelShapes) -> Iterator[KernelCheck]:
    for name, count in shapes.n_unchecked.items():
        yield KernelCheck(
            name="quantized layer",
            shape=f"{count} layers of class {name}",
            dtype=_name(shapes.dtype),
            outcome=KernelOutcome.UNAVAILABLE,
            detail="this class has no check",
        )


def _checked(
    name: str,
    shape: str,
    dtype: mx.Dtype,
    compute: Callable[[], mx.array],
    reference: Callable[[], mx.array],
    *,
    rows: bool = False,
    is_optional: bool = False,
) -> KernelCheck:
    """Compare a result of the default device; wrong `rows` are named."""
    try:
        result = compute()
        mx.eval(result)
    except (ValueError, RuntimeError) as error:
        outcome, detail = _refused(error)
        if is_optional and outcome is not KernelOutcome.FAILED:
            outcome = KernelOutcome.UNAVAILABLE
        return KernelCheck(name, shape, _name(dtype), outcome, detail=detail)
    tolerance = _tolerance(dtype)
    with mx.stream(mx.cpu):
        expected = reference()
        difference = mx.abs(_wide(result) - expected)
        squares = mx.square(expected)
        deviation = mx.sqrt(squares.mean(axis=-1, keepdims=True))
        difference /= mx.maximum(deviation, MIN_DEVIATION * mx.sqrt(squares.mean()))
        largest: Any = difference.max().item()
        row = mx.argmax(difference.reshape(difference.shape[0], -1).max(axis=1)).item()
    # A number that is none compares with nothing.
    is_ok = largest <= tolerance.deviations
    outcome = KernelOutcome.OK
    place = ""
    if not is_ok:
        outcome = KernelOutcome.FAILED
        if rows:
            place = f"row {row}"
    bound = tolerance.deviations
    return KernelCheck(name, shape, _name(dtype), outcome, largest, bound, tolerance.reason, place)


def _refused(error: ValueError | RuntimeError) -> tuple[KernelOutcome, str]:
    """Verdict on a kernel that did not run, and its error."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, ValueError):
        return KernelOutcome.MISSING, text
    if device_error(error) is not None:
        return KernelOutcome.FAILED, text
    return KernelOutcome.MISSING, f"missing pipeline: {text}"


def _tolerance(dtype: mx.Dtype) -> Tolerance:
    return TOLERANCES.get(dtype, ON_GPU if has_gpu() else ON_CPU)


def _random(shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> mx.array:
    """Seeded normal numbers, evaluated."""
    numbers = mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
    mx.eval(numbers)
    return numbers


def _wide(array: mx.array) -> mx.array:
    """The array in float32, computed on the CPU."""
    return array.astype(mx.float32, stream=mx.cpu)


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
