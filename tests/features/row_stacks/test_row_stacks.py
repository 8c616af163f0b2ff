"""Stacked rows: the same tokens as alone, whatever happens to the rows and their contexts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxstack.core.engine_events import TokenSampled
from mlxstack.core.preset import KVSpec, ModelSpec, SlotSpec
from mlxstack.core.request import SamplingParams
from mlxstack.engine.decode import remembered_checks
from mlxstack.engine.decode.batch import Batch
from mlxstack.engine.decode.batch_row import BatchRow
from mlxstack.engine.decode.batching_check import self_check
from mlxstack.engine.decode.row_grouper import RowGrouper
from mlxstack.engine.decode.sampler import Sampler
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.loading import loader
from mlxstack.engine.loop import EngineLoop
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner
from mlxstack.features.row_stacks.engine import (
    MIN_ROOM,
    RowStack,
    RowStacker,
    StackedKVCache,
    stack_fully,
)
from mlxstack.features.row_stacks.policy import StackingRules
from tests.conftest import ModelOf
from tests.engine.harness import array_bytes, preset_of, prompt, running
from tests.models import VOCAB
from tests.patience import PATIENCE_S
from tests.repetition import in_soak

COMMON = ["tiny-swa", "tiny-hybrid"]
MORE = ["tiny", "tiny-sinks", "tiny-mla"]
LENGTHS = (3, 90, 40, 130)
"""Within and beyond the windows of the models; beside each other."""
AT_ONCE = StackingRules(least_steps=1, repaid_bytes=1 << 60, most_padding=10**6)
TWO = SlotSpec(count=2, n_ctx=1024)
N_TOKENS = 24
MAX_TOKENS = 44
"""Steps of all rows together, and of a row until all have left and gone on."""


class Rows:
    """A batch of rows of a model, which a test joins, touches and ends."""

    def __init__(self, model: Any, rules: StackingRules = AT_ONCE, is_ahead: bool = False) -> None:
        self.model, self.cache_factory = model, CacheFactory(model, KVSpec())
        self.asked: list[int] = []
        self.stacker = RowStacker(lambda n: not self.asked.append(n), rules)
        self.batch = Batch(ModelRunner(model), grouper=self.stacker)
        self.batch.is_ahead = is_ahead
        self.contexts: dict[int, SlotContext] = {}
        self.answers: dict[int, list[int]] = {}

    def join(self, slot: int) -> None:
        """The row of this slot decodes."""
        tokens = prompt_of(slot)
        context = SlotContext(self.cache_factory)
        self.model(mx.array([tokens[:-1]]), cache=context.caches)
        context.extend(tokens[:-1])
        context.evaluate()
        self.contexts[slot] = context
        self.answers[slot] = []
        sampler = Sampler(SamplingParams(), tokens, 0)
        self.batch.join(BatchRow(slot, context, sampler, tokens[-1], request=str(slot)))

    def step(self, n: int = 1) -> None:
        """Decode so many tokens of every row."""
        for _ in range(n):
            for sampled in self.batch.step():
                self.answers[int(sampled.request)].append(sampled.token)

    def leave(self, slot: int) -> SlotContext:
        """End a row; its context holds all its KV."""
        if self.batch.in_flight:
            for sampled in self.batch.sync():
                self.answers[int(sampled.request)].append(sampled.token)
        self.batch.leave(slot)
        context = self.contexts.pop(slot)
        context.detach()
        return context


def is_stacking(grouper: RowGrouper) -> bool:
    """Whether there is a stack."""
    stack = grouper._stack if isinstance(grouper, RowStacker) else None
    return stack is not None and not stack.is_dissolved


def prompt_of(slot: int) -> tuple[int, ...]:
    return prompt(LENGTHS[slot % len(LENGTHS)] + slot, seed=slot)


@pytest.fixture(scope="module", params=[*COMMON, *in_soak(*MORE)])
def model(request: pytest.FixtureRequest, model_of: ModelOf) -> Any:
    return loader.load(ModelSpec(id=str(model_of(request.param))), KVSpec()).model


@pytest.fixture(scope="module")
def cold(model: Any) -> Callable[[int, int], list[int]]:
    """The first tokens that a slot's prompt is answered with, computed alone."""
    known: dict[int, list[int]] = {}

    def answer(slot: int, n: int) -> list[int]:
        if len(known.get(slot, ())) < n:
            rows = Rows(model)
            rows.join(slot)
            rows.step(max(n, MAX_TOKENS))
            known[slot] = rows.answers[slot]
        return known[slot][:n]

    return answer


def continued(rows: Rows, context: SlotContext, slot: int, n: int) -> list[int]:
    """The answer so far, and `n` tokens that follow from this context alone."""
    so_far = rows.answers[slot]
    assert len(context) == len(prompt_of(slot)) - 1 + len(so_far)
    again = Rows(rows.model)
    again.contexts[slot] = context
    again.answers[slot] = []
    sampler = Sampler(SamplingParams(), prompt_of(slot), 0)
    again.batch.join(BatchRow(slot, context, sampler, so_far[-1], request=str(slot)))
    again.step(n)
    return so_far + again.answers[slot]


@pytest.mark.parametrize("model", [*COMMON, *MORE], indirect=True, scope="module")
@pytest.mark.parametrize("is_ahead", [False, True])
def test_stacked_rows_get_the_tokens_of_each_alone(
    model: Any, cold: Callable[[int, int], list[int]], is_ahead: bool
) -> None:
    rows = Rows(model, is_ahead=is_ahead)
    for slot in range(4):
        rows.join(slot)
    rows.step(N_TOKENS)
    assert is_stacking(rows.stacker)
    for slot, answer in rows.answers.items():
        assert answer == cold(slot, len(answer))
    for slot in range(4):
        context = rows.leave(slot)
        rows.step(3)
        assert continued(rows, context, slot, 5) == cold(slot, len(rows.answers[slot]) + 5)


ACTS = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "touch", "fork"]), st.integers(0, 3)), max_size=6
)


@settings(max_examples=15, deadline=None)
@given(acts=ACTS, is_ahead=st.booleans(), building=st.sampled_from([1, 1 << 25]))
def test_whatever_happens_to_the_rows_no_token_differs(
    model: Any,
    cold: Callable[[int, int], list[int]],
    acts: Sequence[tuple[str, int]],
    is_ahead: bool,
    building: int,
) -> None:
    rules = replace(AT_ONCE, building_bytes=building)
    rows = Rows(model, rules, is_ahead)
    for slot in (0, 1):
        rows.join(slot)
    for action, slot in acts:
        rows.step(5)
        if action == "join" and slot not in rows.answers:
            rows.join(slot)
        elif slot not in rows.contexts:
            continue
        elif action == "leave" and rows.answers[slot]:
            context = rows.leave(slot)
            assert continued(rows, context, slot, 3) == cold(slot, len(rows.answers[slot]) + 3)
        elif action == "touch":
            rows.contexts[slot].take_back()
        elif action == "fork" and not is_ahead:
            fork = rows.contexts[slot].new_empty()
            n_forked = fork.fork_from(rows.contexts[slot], len(rows.contexts[slot]))
            assert fork.tokens == rows.contexts[slot].tokens[:n_forked]
            if rows.answers[slot]:
                assert continued(rows, fork, slot, 3) == cold(slot, len(rows.answers[slot]) + 3)
    rows.step(5)
    for slot, answer in rows.answers.items():
        assert answer == cold(slot, len(answer))


def test_rows_beyond_the_room_of_a_stack_are_stacked_anew(model_of: ModelOf) -> None:
    rows = Rows(loader.load(ModelSpec(id=str(model_of("tiny"))), KVSpec()).model)
    alone = [Rows(rows.model) for _ in range(2)]
    for slot in range(2):
        rows.join(slot)
        alone[slot].join(slot)
        alone[slot].step(300)
    rows.step(300)
    assert is_stacking(rows.stacker)
    assert len(rows.asked) == 1 + 300 // MIN_ROOM
    assert rows.asked == sorted(set(rows.asked))
    assert [rows.answers[slot] for slot in range(2)] == [
        alone[slot].answers[slot] for slot in range(2)
    ]


def test_a_stack_counts_and_is_freed(model_of: ModelOf) -> None:
    rows = Rows(loader.load(ModelSpec(id=str(model_of("tiny"))), KVSpec()).model)
    for slot in (1, 3):
        rows.join(slot)
    contexts = list(rows.contexts.values())
    before = array_bytes()
    counted = sum(c.cache_bytes for c in contexts)
    rows.step(4)
    stacked = sum(c.cache_bytes for c in contexts) - counted
    assert stacked == pytest.approx(rows.asked[-1], rel=0.01)
    assert array_bytes() - before == pytest.approx(stacked, rel=0.1)
    contexts[0].take_back()
    contexts[0].evaluate()
    contexts[1].evaluate()
    assert sum(c.cache_bytes for c in contexts) == counted
    assert array_bytes() - before <= 0.1 * stacked


def test_neither_uneven_rows_nor_those_without_room_are_stacked(model_of: ModelOf) -> None:
    model = loader.load(ModelSpec(id=str(model_of("tiny"))), KVSpec()).model
    uneven = Rows(model, replace(AT_ONCE, most_padding=10))
    for slot in range(2):
        uneven.join(slot)
    uneven.step(5)
    assert not uneven.asked
    full = Rows(model)
    full.stacker = full.batch._grouper = RowStacker(lambda _: False, AT_ONCE)
    for slot in range(2):
        full.join(slot)
    full.step(5)
    assert not is_stacking(full.stacker)


def test_a_model_whose_stacked_rows_differ_is_not_stacked(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_factory = CacheFactory(model, KVSpec())
    assert self_check(model, cache_factory, VOCAB, group_rows=stack_fully).can_group
    monkeypatch.setattr(StackedKVCache, "make_mask", lambda *_, **__: None)
    check = self_check(model, cache_factory, VOCAB, group_rows=stack_fully)
    assert check.is_batching
    assert not check.can_group


def test_an_engine_stacks_no_model_that_fails_the_check(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StackedKVCache, "make_mask", lambda *_, **__: None)
    monkeypatch.setattr(remembered_checks, "self_check", self_check)
    prompts = [prompt_of(slot) for slot in range(2)]
    with running(preset_of(model_of("tiny-swa"), slots=TWO), tmp_path) as driver:
        assert driver.engine.snapshot().is_batching
        cold = [driver.cold(tokens, 30) for tokens in prompts]
        asks = [driver.submit(tokens, 30, use_cache=False) for tokens in prompts]
        for ask, answer in zip(asks, cold, strict=True):
            driver.finish(ask)
            assert driver.tokens(ask) == answer


def test_stacks_give_way_to_memory_pressure(model_of: ModelOf, tmp_path: Path) -> None:
    with running(preset_of(model_of("tiny"), slots=TWO), tmp_path) as driver:
        asks = [driver.submit(prompt_of(slot), 400, use_cache=False) for slot in range(2)]
        for ask in asks:
            driver.until(ask, TokenSampled, 60)

        def drop(loop: EngineLoop) -> tuple[bool, bool]:
            before = is_stacking(loop.batch._grouper)
            loop.slot_kv.drop_copies()
            return before, is_stacking(loop.batch._grouper)

        assert driver.engine.run(drop).result(timeout=PATIENCE_S) == (True, False)
        for ask in asks:
            driver.finish(ask)


def test_contexts_without_kv_are_no_stack(model_of: ModelOf) -> None:
    model = loader.load(ModelSpec(id=str(model_of("tiny-hybrid"))), KVSpec()).model
    contexts = [SlotContext(CacheFactory(model, KVSpec())) for _ in range(2)]
    assert RowStack(contexts).lengths == []
