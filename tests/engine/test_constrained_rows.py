"""A guided row keeps to its mask, at once or a step ahead, and its neighbours do not notice."""

import itertools
from typing import Any

import mlx.core as mx
import pytest

from mlxstack.core.preset import KVSpec, ModelSpec
from mlxstack.core.request import SamplingParams
from mlxstack.engine.decode.batch import Batch
from mlxstack.engine.decode.batch_row import BatchRow
from mlxstack.engine.decode.sampler import Sampler, masked
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.loading import loader
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner
from tests.conftest import ModelOf
from tests.engine.harness import prompt
from tests.models import VOCAB

pytestmark = pytest.mark.mlx
PROMPTS = [prompt(n, seed=n) for n in (40, 7, 90)]
N = 9


class Stairs:
    """Allows the two tokens that follow the last one it took, and insists on having been told."""

    def __init__(self) -> None:
        self.taken = [500]

    def mask(self) -> bytes:
        bits = sum(1 << (self.taken[-1] + step) for step in (1, 2))
        return bits.to_bytes(VOCAB // 8, "little")

    def advance(self, token: int) -> None:
        assert token - self.taken[-1] in (1, 2)
        self.taken.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["tiny", "tiny-hybrid"])
def test_guided_beside_free_rows_at_once_and_ahead(
    model_of: ModelOf, kind: str, temperature: float
) -> None:
    model = loader.load(ModelSpec(id=str(model_of(kind))), KVSpec()).model
    sampling = SamplingParams(temperature=temperature, seed=3)
    free = _run(model, sampling, is_guided=False, is_ahead=False)
    at_once = _run(model, sampling, is_guided=True, is_ahead=False)
    ahead = _run(model, sampling, is_guided=True, is_ahead=True)
    assert at_once == ahead
    assert (at_once[0], at_once[2]) == (free[0], free[2])
    climbed = [500, *at_once[1]]
    assert {b - a for a, b in itertools.pairwise(climbed)} <= {1, 2}
    assert free[1] != at_once[1]


def test_bits_beyond_the_mask_are_forbidden() -> None:
    logits = mx.zeros((1, 20), mx.float16)
    found: Any = masked(logits, bytes([0b101, 0b10])).tolist()
    allowed = [i for i, value in enumerate(found[0]) if value == 0]
    assert allowed == [0, 2, 9]


def _run(
    model: Any, sampling: SamplingParams, *, is_guided: bool, is_ahead: bool
) -> list[list[int]]:
    """Three rows; the middle one may be guided."""
    batch = Batch(ModelRunner(model))
    cache_factory = CacheFactory(model, KVSpec())
    batch.is_ahead = is_ahead
    for slot, tokens in enumerate(PROMPTS):
        context = SlotContext(cache_factory)
        model(mx.array([tokens[:-1]]), cache=context.caches)
        context.extend(tokens[:-1])
        walk = Stairs() if is_guided and slot == 1 else None
        sampler = Sampler(sampling, tokens, 0, walk)
        batch.join(BatchRow(slot, context, sampler, tokens[-1], N, request=str(slot)))
    answers: list[list[int]] = [[] for _ in PROMPTS]
    while min(map(len, answers)) < N:
        for sampled in batch.step():
            answers[int(sampled.request)].append(sampled.token)
    assert not batch.take_broken()
    return answers
