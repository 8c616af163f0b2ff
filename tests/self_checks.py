"""What an engine finds out about a model at load, once for each model and cache precision.

Engines of the tests load the same few models again and again, and the self-check is most of such a
start. Its own tests, and those of each kind of model, call it directly.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from msgspec.structs import replace
from xxhash import xxh3_128_hexdigest

from mlxstack.core.exact_rows import ExactBits
from mlxstack.engine import assembly
from mlxstack.engine.decode import remembered_checks
from mlxstack.engine.decode.batching_check import BatchingCheck, CheckSteps, self_check
from mlxstack.engine.decode.row_grouper import GroupRows
from mlxstack.engine.decode.shared_passes import measure_sharing
from mlxstack.engine.decode.width_costs import measure_widths
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner
from mlxstack.features.exact.engine import BitsPlan, MeasuredBits, measure_bits
from mlxstack.policy.pass_layout import SharedPrompts, WidthCosts
from tests.remembered import Result, remembered


def remembered_check(
    model: Any,
    cache_factory: CacheFactory,
    n_vocab: int,
    steps: CheckSteps | None = None,
    group_rows: GroupRows | None = None,
) -> BatchingCheck:
    """The verdict of `self_check` on a model of these weights; an error is not remembered.

    It has no limit of time, so that no test depends on the load of the machine.
    """
    check = partial(self_check, model, cache_factory, n_vocab, group_rows=group_rows)
    key = (n_vocab, group_rows is None)
    return _once(model, cache_factory, key, BatchingCheck, check)


def remembered_widths(runner: ModelRunner, cache_factory: CacheFactory) -> WidthCosts:
    """What passes of a model of these weights took when `measure_widths` ran first."""
    return _once(
        runner.model, cache_factory, (), WidthCosts, partial(measure_widths, runner, cache_factory)
    )


def remembered_sharing(runner: ModelRunner, cache_factory: CacheFactory) -> SharedPrompts:
    """Prompts that gained by a shared pass when `measure_sharing` ran first on these weights."""
    compute = partial(measure_sharing, runner, cache_factory)
    return _once(runner.model, cache_factory, ("sharing",), SharedPrompts, compute)


def remembered_bits(
    model: Any, cache_factory: CacheFactory, n_vocab: int, plan: BitsPlan
) -> MeasuredBits:
    """Bits of rows, which `auto` leaves off whatever they cost on this machine."""
    compute = partial(measure_bits, model, cache_factory, n_vocab, plan)
    if plan.setting is not ExactBits.AUTO:
        return compute()
    bits = _once(model, cache_factory, ("bits", n_vocab), MeasuredBits, compute)
    return replace(bits, report=replace(bits.report, is_on=False))


REMEMBERED = (
    (remembered_checks, "self_check", remembered_check),
    (assembly, "measure_widths", remembered_widths),
    (assembly, "measure_sharing", remembered_sharing),
    (assembly, "measure_bits", remembered_bits),
)
"""Modules and names that tests replace, and by what."""


def install() -> None:
    """Replace them in this process, a program of the tests."""
    for module, name, replacement in REMEMBERED:
        setattr(module, name, replacement)


def _once(
    model: Any,
    cache_factory: CacheFactory,
    key: tuple[object, ...],
    kind: type[Result],
    compute: Callable[[], Result],
) -> Result:
    module = type(model).__module__
    # A class in a file of the model is another one in each folder. Passes of a model that is
    # divided between ranks are collectives: none may be left out.
    if not module.startswith("mlx_lm.models.") or is_divided(model):
        return compute()
    weights = tuple(
        (name, weight.shape, str(weight.dtype), _digest(weight))
        for name, weight in tree_flatten(model.parameters())
    )
    args = repr(getattr(model, "args", None))
    return remembered((module, args, weights, repr(cache_factory._kv), *key), kind, compute)


def is_divided(model: Any) -> bool:
    """Whether other ranks have parts of this model."""
    names = (type(module).__name__ for _, module in model.named_modules())
    stages = getattr(getattr(model, "model", None), "pipeline_size", 1)
    return stages > 1 or any("Sharded" in name for name in names)


def _digest(weight: mx.array) -> str:
    return xxh3_128_hexdigest(memoryview(mx.contiguous(mx.atleast_1d(weight)).view(mx.uint8)))
