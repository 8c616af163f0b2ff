"""KV is updated in place: a lost donation would copy a whole buffer per token."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxstack.core.preset import KVSpec, ModelSpec
from mlxstack.core.request import SamplingParams
from mlxstack.engine.decode import batch
from mlxstack.engine.decode.batch import Batch
from mlxstack.engine.decode.batch_row import BatchRow
from mlxstack.engine.decode.sampler import Sampler
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.loading import loader
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner
from tests.conftest import ModelOf
from tests.engine.harness import prompt

pytestmark = pytest.mark.mlx

N_TOKENS = 9
N_STEPS = 50


def addresses(context: SlotContext) -> list[int]:
    """Address of each buffer of keys and values; no reference to one stays."""
    parts: list[Any] = [(cache.keys, cache.values) for cache in context.caches]
    arrays = [array for _, array in tree_flatten(parts)]
    mx.eval(arrays)
    return [np.array(array, copy=False).__array_interface__["data"][0] for array in arrays]


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("n_rows", [1, 2])
def test_kv_buffers_stay_where_they_are(
    model_of: ModelOf, n_rows: int, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "has_gpu", lambda: is_ahead)
    model = loader.load(ModelSpec(id=str(model_of("tiny"))), KVSpec()).model
    rows = Batch(ModelRunner(model))
    rows.is_ahead = is_ahead
    contexts = []
    for n in range(n_rows):
        context = SlotContext(CacheFactory(model, KVSpec()))
        tokens = prompt(N_TOKENS + n, seed=n)
        model(mx.array([tokens]), cache=context.caches)
        context.extend(tokens)
        rows.join(BatchRow(n, context, Sampler(SamplingParams(), tokens, n), 10))
        contexts.append(context)
    rows.step()
    before = [addresses(context) for context in contexts]
    for _ in range(N_STEPS):
        assert len(rows.step()) == n_rows
        assert [addresses(context) for context in contexts] == before
    assert bool(rows.in_flight) == is_ahead
    rows.sync()
