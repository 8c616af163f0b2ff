"""Blocks of experts behind `mx.compile`, for passes that are measured to gain.

Compilation fuses element-wise operations and builds a step in less time. The gain depends on the
number of tokens in a pass, so each shape is measured; each has a trace of its own. A block keeps
its names and arrays: a subclass replaces its class. The arrays are inputs of the traces, which
hold none.
"""

import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP
from msgspec import Struct

from mlxstack.engine.device import has_gpu
from mlxstack.engine.device_errors import raise_device_error
from mlxstack.engine.model.cache_adapters import CacheFactory

log = logging.getLogger(__name__)

WIDTHS = (1, 2, 3, 4, 8)
"""Tokens of the passes that may run compiled; prefill chunks have more."""
N_TRIES = 5
"""Alternating tries; the fastest counts."""
MIN_GAIN = 0.03
"""Share of a block's time that compilation has to save."""
MAX_S = 1.0
"""Seconds of measuring after which further passes stay as they are."""
ROUTERS = ("gate", "router")
"""Names of the router in mlx-lm's blocks of experts."""

Clock = Callable[[], float]
Shape = tuple[int, int]
"""Sequences of a pass, and tokens of each."""
PassKey = tuple[mx.Dtype, Shape]
"""Type of the states in a pass, and its shape: all that a trace depends on."""


class ExpertBlock:
    """Block of experts, with its own function and the compiled one.

    Both take states (B, T, dim) and return as many.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.own_class = type(block)
        self.plain = partial(self.own_class.__call__, block)
        self.compiled = mx.compile(self.plain, inputs=block)

    def compile_for(self, keys: frozenset[PassKey]) -> None:
        """Run passes of these keys compiled, and others as before."""
        plain = self.plain
        compiled = self.compiled

        def call(x: mx.array) -> mx.array:
            is_compiled = (x.dtype, x.shape[:-1]) in keys
            output: mx.array = compiled(x) if is_compiled else plain(x)
            return output

        if keys:
            self.replace_call(call)

    def replace_call(self, call: Callable[[mx.array], mx.array]) -> None:
        """Replace the block's class by a subclass with this function."""
        members = {"__call__": lambda _, x: call(x)}
        self.block.__class__ = type(self.own_class.__name__, (self.own_class,), members)

    def restore_call(self) -> None:
        """Give the block its own class again."""
        self.block.__class__ = self.own_class

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Put the arrays back after a trace.

        MLX leaves placeholders in their place where a trace fails.
        """
        modules = [module for _, module in self.block.named_modules()]
        before = [dict(module) for module in modules]
        try:
            yield
        finally:
            for module, items in zip(modules, before, strict=True):
                dict.clear(module)
                dict.update(module, items)


class BlockInput(Struct, frozen=True):
    """Block and the states (B, T, dim) that a pass brings it."""

    block: ExpertBlock
    x: mx.array


def compile_experts(
    model: Any,
    cache_factory: CacheFactory,
    n_slots: int,
    *,
    is_drafting: bool,
    clock: Clock = time.perf_counter,
) -> None:
    """Compile blocks of experts where that is measured to gain.

    On a GPU only, for passes that give the same bits. `n_slots` bounds their rows. Raises
    DeviceError.
    """
    blocks = expert_blocks(model) if has_gpu() else []
    if not blocks:
        return
    until = clock() + MAX_S
    gains: dict[PassKey, float] = {}
    for shape in _shapes(n_slots, is_drafting):
        if clock() > until:
            log.info("experts are not compiled for %s: measuring took too long", _describe(shape))
            continue
        try:
            inputs = _inputs(model, cache_factory, blocks, shape)
            gain = _gain(inputs, clock, until)
        except Exception as error:
            raise_device_error(error)
            log.warning("experts are not compiled for %s: %s", _describe(shape), error)
            continue
        if gain >= MIN_GAIN:
            gains[inputs[0].x.dtype, shape] = gain
    for block in blocks:
        block.compile_for(frozenset(gains))
    shapes_gained = [
        f"{_describe(shape)} ({gain:.0%} faster)" for (_, shape), gain in gains.items()
    ]
    log.info("experts are compiled for passes of %s", ", ".join(shapes_gained) or "no shape")


def expert_blocks(model: nn.Module) -> list[ExpertBlock]:
    """Modules that route states to experts and depend on nothing else."""
    return [ExpertBlock(module) for _, module in model.named_modules() if _is_expert_block(module)]


def _is_expert_block(module: nn.Module) -> bool:
    has_experts = any(isinstance(child, SwitchGLU | SwitchMLP) for child in module.values())
    if not has_experts or not any(name in module for name in ROUTERS):
        return False
    return len(inspect.signature(module.__call__).parameters) == 1


def _shapes(n_slots: int, is_drafting: bool) -> list[Shape]:
    """Passes of several rows, and those of one row with a draft."""
    rows = [(n, 1) for n in WIDTHS if n <= n_slots]
    return rows + [(1, n) for n in WIDTHS if n > 1 and is_drafting]


def _describe(shape: Shape) -> str:
    n_rows, n_tokens = shape
    if n_tokens > 1:
        return f"{n_tokens} tokens of a row"
    return f"{n_rows} rows" if n_rows > 1 else "1 row"


def _inputs(
    model: Any, cache_factory: CacheFactory, blocks: Sequence[ExpertBlock], shape: Shape
) -> list[BlockInput]:
    """Inputs of all blocks in a pass over different tokens, in order."""
    inputs: list[BlockInput] = []

    def record(block: ExpertBlock, x: mx.array) -> mx.array:
        inputs.append(BlockInput(block, x))
        output: mx.array = block.plain(x)
        return output

    tokens = mx.arange(1, shape[0] * shape[1] + 1).reshape(shape)
    try:
        for block in blocks:
            block.replace_call(partial(record, block))
        mx.eval(model(tokens, cache=cache_factory.make()))
    finally:
        for block in blocks:
            block.restore_call()
    if {id(block_input.block) for block_input in inputs} != set(map(id, blocks)):
        raise RuntimeError("a pass of the model does not run all of them")
    if {(block_input.x.dtype, block_input.x.shape[:-1]) for block_input in inputs} != {
        (inputs[0].x.dtype, shape)
    }:
        raise RuntimeError("their states have another shape than the tokens")
    mx.eval([block_input.x for block_input in inputs])
    return inputs


def _gain(inputs: Sequence[BlockInput], clock: Clock, until: float) -> float:
    """Share of time that compilation saves; 0 when unknown by `until`.

    Raises RuntimeError where the bits of a block differ.
    """
    _check_bits(inputs)
    seconds = {False: inf, True: inf}
    for _ in range(N_TRIES):
        for is_compiled, fastest in seconds.items():
            seconds[is_compiled] = min(fastest, _seconds(inputs, is_compiled, clock))
        if clock() > until:
            return 0.0
    return 1 - seconds[True] / seconds[False]


def _check_bits(inputs: Sequence[BlockInput]) -> None:
    """Trace each block, and compare all numbers. Raises RuntimeError where they differ."""
    for block_input in inputs:
        with block_input.block.unchanged():
            compiled = block_input.block.compiled(block_input.x)
        plain = block_input.block.plain(block_input.x)
        if plain.dtype != compiled.dtype or not mx.array_equal(_bits(plain), _bits(compiled)):
            raise RuntimeError("the compiled function gives other numbers")


def _bits(array: mx.array) -> mx.array:
    return mx.contiguous(array).view(mx.uint8)


def _seconds(inputs: Sequence[BlockInput], is_compiled: bool, clock: Clock) -> float:
    """Seconds of all blocks, one after the other as in a pass."""
    began = clock()
    output = inputs[0].x
    for block_input in inputs:
        (x,) = mx.depends([block_input.x], [output])
        output = block_input.block.compiled(x) if is_compiled else block_input.block.plain(x)
    mx.eval(output)
    return clock() - began
