"""Examines one model type from building to 8-bit KV, and puts what it finds into a row."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from mlx_lm.models.cache import CacheList, QuantizedKVCache, make_prompt_cache
from msgspec import Struct

from mlxstack.core.exact_rows import ExactBits
from mlxstack.engine.decode.batching_check import self_check
from mlxstack.engine.model.cache_adapters import CacheFactory, leaves
from mlxstack.features.exact.engine import exact_model, measure_bits, plan_of
from mlxstack.features.row_stacks.engine import stack_fully
from mlxstack.policy.pass_layout import RowMode
from tests.matrix import checks
from tests.matrix.builder import Unbuildable, build
from tests.matrix.configs import VOCAB


class Row(Struct, frozen=True):
    """A line of the table. Empty cells mean that it did not come to this."""

    name: str
    caches: str = ""
    batched: str = ""
    rewind: str = ""
    stored: str = ""
    kv8: str = ""
    note: str = ""
    faults: tuple[str, ...] = ()
    """Promises broken; the matrix fails when there is one."""


def examine(name: str) -> Row:
    """Everything about this type."""
    try:
        model = build(name)
        caches = describe(make_prompt_cache(model))
        cache_factory = CacheFactory(model, checks.KV16)
        check = self_check(model, cache_factory, VOCAB, group_rows=stack_fully)
    except Unbuildable as error:
        return Row(name, note=f"not built: {error}")
    except Exception as error:
        return Row(name, note=f"does not run: {message(error)}")
    faults: list[str] = []
    attempt(faults, "batch", lambda: checks.check_batch(model, cache_factory, check.rows))
    plan = plan_of(ExactBits.ON, n_slots=4, rows=check.rows)
    exact = exact_model(model, measure_bits(model, cache_factory, VOCAB, plan)).mode
    if exact is not None and check.is_batching:
        attempt(
            faults,
            "equal bits",
            lambda: checks.check_exact(model, cache_factory, check.rows, exact),
        )
    if check.can_group:
        attempt(faults, "stacks", lambda: checks.check_stacks(model, cache_factory))
    if check.can_draft:
        attempt(faults, "drafts", lambda: checks.check_drafts(model, cache_factory, check))
    rewind = attempt(faults, "rewind", lambda: checks.check_rewind(model, cache_factory))
    stored = attempt(faults, "store", lambda: checks.check_stored(model, cache_factory))
    kv8, why_not_8 = examine_kv8(model, faults)
    return Row(
        name,
        caches,
        BATCHED[check.rows],
        rewind,
        stored,
        kv8,
        "; ".join(filter(None, (check.why_not, why_not_8))),
        tuple(faults),
    )


def examine_kv8(model: Any, faults: list[str]) -> tuple[str, str]:
    """Whether all of it holds with 8-bit KV, and if not, why."""
    cache_factory = CacheFactory(model, checks.KV8)
    if not any(isinstance(leaf, QuantizedKVCache) for leaf in leaves(cache_factory.make())):
        return "none", ""
    try:
        check = self_check(model, cache_factory, VOCAB, group_rows=stack_fully)
    except Exception as error:
        return "no", f"8-bit KV: {message(error)}"
    attempt(faults, "kv8 batch", lambda: checks.check_batch(model, cache_factory, check.rows))
    if check.can_draft:
        attempt(
            faults,
            "kv8 drafts",
            lambda: checks.check_drafts(model, cache_factory, check, checks.GREEDY),
        )
    attempt(faults, "kv8 rewind", lambda: checks.check_rewind(model, cache_factory))
    attempt(faults, "kv8 store", lambda: checks.check_stored(model, cache_factory))
    why_not = f"8-bit KV: {check.why_not}" if check.why_not else ""
    return BATCHED[check.rows], why_not


def describe(caches: list[Any]) -> str:
    """Kinds and counts, such as "2 sliding + 2 full"."""
    counts = Counter(_kind(cache) for cache in caches)
    return " + ".join(f"{n} {kind}" for kind, n in counts.items())


BATCHED = {
    RowMode.ALONE: "slot by slot",
    RowMode.ATTENTION_BY_ROW: "attention by row",
    RowMode.SINGLE: "yes",
    RowMode.RAGGED: "yes",
}
"""Words of the page."""

KINDS = {
    "KVCache": "full",
    "RotatingKVCache": "sliding",
    "ChunkedKVCache": "chunked",
    "ArraysCache": "state",
    "RecurrentCache": "state",
}


def _kind(cache: Any) -> str:
    if isinstance(cache, CacheList):
        return "(" + " & ".join(_kind(inner) for inner in cache.caches) + ")"
    return KINDS.get(type(cache).__name__, type(cache).__name__)


def attempt(faults: list[str], check_name: str, check: Callable[[], str | None]) -> str:
    """The verdict of a check; what it raises is noted as a fault."""
    try:
        return check() or ""
    except Exception as error:
        faults.append(f"{check_name}: {message(error)}")
        return "FAILED"


def message(error: Exception) -> str:
    """The first line of an error, with its type where it is no verdict of a check."""
    first = (str(error).splitlines() or [""])[0]
    return first if isinstance(error, checks.Wrong) else f"{type(error).__name__}: {first}"
