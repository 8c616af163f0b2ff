"""Models whose attention computes one row at a time answer in a batch as alone."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import KVCache

from mlxstack.engine.decode.batching_check import self_check
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.row_modules import split_attention
from mlxstack.engine.model.row_views import RowCaches
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.policy.pass_layout import RowMode
from tests.matrix import checks
from tests.matrix.builder import build
from tests.matrix.configs import VOCAB
from tests.repetition import in_soak

pytestmark = pytest.mark.mlx

PAST_THE_SEAM = ["gemma2", "deepseek_v32"]
"""Own attention; sparse attention with an index in the cache."""
VIEWED = ["llama", "falcon_h1", "gemma3_text"]
"""These need no split, and are right with it."""


@pytest.mark.parametrize(
    "name", [*PAST_THE_SEAM, *in_soak("glm_moe_dsa", "minimax_m3_vl", "phi3small", "plamo2")]
)
def test_attention_past_the_seam_is_computed_row_by_row(name: str) -> None:
    model = build(name)
    factory = CacheFactory(model, checks.KV16)
    check = self_check(model, factory, VOCAB)
    assert check.rows is RowMode.ATTENTION_BY_ROW
    assert check.why_not is not None
    checks.check_batch(model, factory, check.rows)


@pytest.mark.parametrize("name", VIEWED)
def test_any_model_may_be_split(name: str) -> None:
    model = build(name)
    checks.check_batch(model, CacheFactory(model, checks.KV16), RowMode.ATTENTION_BY_ROW)


def test_other_layers_see_all_rows_at_once() -> None:
    model = build("gemma2")
    factory = CacheFactory(model, checks.KV16)
    layer = model.layers[0].mlp
    kind = type(layer)
    widths: list[int] = []

    def watched(module: Any, x: mx.array) -> mx.array:
        widths.append(x.shape[0])
        return kind.__call__(module, x)

    layer.__class__ = type(kind.__name__, (kind,), {"__call__": watched})
    runner = ModelRunner(model, rows=RowMode.ATTENTION_BY_ROW)
    contexts = [SlotContext(factory) for _ in checks.PROMPTS]
    runner.execute([SlotTokens(context.own_caches, mx.array([5])) for context in contexts])
    assert widths == [len(contexts)]


def test_ordinary_caches_are_used_as_before() -> None:
    model = build("gemma2")
    tokens = mx.array([[1, 2, 3]])
    before = model(tokens)
    for _ in range(2):
        split_attention(model)
    assert mx.array_equal(before, model(tokens))
    assert len(type(model.layers[0].self_attn).__bases__) == 2
    assert len(type(model.layers[0].self_attn).__mro__[2].__bases__) == 1


class Chooser(nn.Module):  # type: ignore[misc]
    """Returns of each row as many values as its cache has tokens; None for one."""

    def __call__(
        self, x: mx.array, before: Any = None, cache: Any = None, positions: mx.array | None = None
    ) -> tuple[mx.array, Any]:
        assert x.shape[0] == 1 and isinstance(cache, KVCache)
        assert positions is None or positions.shape == (3, 1, 1)
        n = cache.offset
        if before is not None:
            assert before.shape == (n,)
        return x + n, mx.arange(n) if n > 1 else None


def filled(n: int) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, n, 4)), mx.zeros((1, 1, n, 4)))
    return cache


@pytest.mark.parametrize("lengths", [(1, 4, 2), (3, 3, 3)])
def test_values_of_each_row_reach_the_next_module(lengths: Sequence[int]) -> None:
    """Among them what differs by row, and positions on three axes of three rows."""
    module = Chooser()
    split_attention(SimpleNamespace(layers=[module]))
    caches = RowCaches([filled(n) for n in lengths], [1, 1, 1])
    positions = mx.zeros((3, 3, 1), mx.int32)
    rows = mx.zeros((3, 1))
    rows, kept = module(rows, None, caches, positions=positions)
    rows, _ = module(rows, kept, cache=caches)
    assert rows[:, 0].tolist() == [2 * n for n in lengths]
    assert caches.offset.tolist() == list(lengths)
