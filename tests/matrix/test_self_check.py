"""The self-check finds what the row view cannot serve, also where that shows late only."""

from typing import Any

import mlx.core as mx
import pytest

from mlxstack.core.errors import SetupError
from mlxstack.core.preset import KVSpec
from mlxstack.engine.decode.batching_check import CheckSteps, self_check
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.features.row_stacks.engine import stack_fully
from mlxstack.host.load_progress import LoadProgress
from mlxstack.policy.pass_layout import RowMode
from tests.matrix import checks
from tests.matrix.builder import build
from tests.matrix.configs import VOCAB, WINDOW
from tests.repetition import in_soak

pytestmark = pytest.mark.mlx


class WrongBeyond:
    """A model whose batched rows go wrong once one of them has more than `n` tokens."""

    def __init__(self, model: Any, n: int) -> None:
        self.model = model
        self.n = n

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self.model(tokens, cache=cache)
        offsets = cache[0].offset
        if isinstance(offsets, mx.array) and offsets.max().item() > self.n:
            return logits[::-1]
        return logits


class LastOnly:
    """A model that computes logits of the last token of a sequence only."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self.model(tokens, cache=cache)
        return mx.concatenate([mx.zeros_like(logits[:, :-1]), logits[:, -1:]], axis=1)


class Minutes:
    """A clock on which each look is a minute after the last."""

    def __init__(self) -> None:
        self.n_looks = 0

    def __call__(self) -> float:
        self.n_looks += 1
        return 60.0 * self.n_looks


def verdict_of(model: Any, kv: KVSpec = checks.KV16) -> Any:
    return self_check(model, CacheFactory(model, kv), VOCAB)


def test_a_slow_machine_leaves_out_what_only_makes_answers_faster(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rows are always compared; each of the others begins within the budget, or stays off."""
    model = build("phi")
    progress = LoadProgress()
    steps = CheckSteps(progress, budget_s=150.0, clock=Minutes())
    check = self_check(model, CacheFactory(model, checks.KV16), VOCAB, steps, stack_fully)
    assert check.is_batching and check.can_group and not check.can_draft
    assert check.why_no_drafts == "there was no time to check them at the start"
    assert progress.step == "self-check 2 of 5: rows in common arrays" and progress.n_reports == 2
    assert "took more than 150 s, so that drafts of rows together stay off" in caplog.text
    assert self_check(model, CacheFactory(model, checks.KV16), VOCAB).can_draft


@pytest.mark.parametrize("name", ["gemma3_text", "mamba", "phi", "stablelm"])
def test_z11_rows_are_batched_where_they_may(name: str) -> None:
    assert verdict_of(build(name)).why_not is None


def test_z11_a_fault_past_the_window_is_found() -> None:
    check = verdict_of(WrongBeyond(build("gemma3_text"), WINDOW))
    assert not check.is_batching
    assert "differ from alone" in check.why_not


def test_a_model_without_logits_for_each_token_of_a_draft_is_not_drafted_for() -> None:
    model = build("llama")
    assert verdict_of(model).can_draft
    check = verdict_of(LastOnly(model))
    assert check.is_batching and not check.can_draft


@pytest.mark.parametrize("name", ["nemotron_h", *in_soak("baichuan_m1", "jamba", "rwkv7")])
def test_rows_of_different_length_leave_no_padding_in_states(name: str) -> None:
    model = build(name)
    check = verdict_of(model)
    assert check.can_draft
    checks.check_drafts(model, CacheFactory(model, checks.KV16), check)


def test_z11_a_position_for_all_rows_is_found_and_served_slot_by_slot() -> None:
    model = build("gpt_bigcode")
    check = verdict_of(model)
    assert not check.is_batching
    assert check.why_not.startswith("the row view cannot serve it")
    checks.check_batch(model, CacheFactory(model, checks.KV16), check.rows)


def test_f9_kv_bits_that_the_model_cannot_have_are_refused_in_words() -> None:
    with pytest.raises(SetupError, match=r"in 8 bits .*set kv\.bits to 16"):
        verdict_of(build("deepseek_v3"), checks.KV8)


def test_z11_a_precision_that_comes_later_is_checked_at_load() -> None:
    with pytest.raises(SetupError, match="in 8 bits"):
        verdict_of(build("deepseek_v3"), KVSpec(bits=8, group_size=32, quantized_start=4096))


class OfUnknownKind(CacheFactory):
    """Caches of a class that neither mlx-lm nor mlx-vlm has."""

    def make(self, n_tokens: int = 0) -> list[Any]:
        caches = super().make(n_tokens)
        for cache in caches:
            cache.__class__ = type("Unknown", (type(cache),), {"__module__": "elsewhere"})
        return caches


def test_f9_a_cache_of_unknown_kind_is_never_stored_or_rewound() -> None:
    model = build("deepseek_v41")
    cache_factory = OfUnknownKind(model, checks.KV16)
    assert checks.check_stored(model, cache_factory) == "no"
    assert checks.check_rewind(model, cache_factory) == "no"


@pytest.mark.parametrize(
    "position", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 5]
)
def test_f9_chunked_attention_goes_back_to_a_checkpoint_anywhere(position: int) -> None:
    model = build("llama4")
    cache_factory = CacheFactory(model, checks.KV16)
    context = past_checkpoint(model, cache_factory, position)
    changed = [*checks.LONG[:position], *checks.prompt(30, seed=7)]
    assert context.rewind(position) == position
    checks.prefill(model, context, changed)
    warm = checks.decode(model, [context], [changed], rows=RowMode.ALONE)[0]
    assert warm == checks.cold(model, cache_factory, changed)


def past_checkpoint(model: Any, cache_factory: CacheFactory, position: int) -> SlotContext:
    """A context of LONG with a checkpoint after `position` tokens."""
    context = SlotContext(cache_factory)
    for start, end in ((0, position), (position, len(checks.LONG) - 1)):
        model(mx.array([checks.LONG[start:end]]), cache=context.caches)
        context.extend(checks.LONG[start:end])
        context.evaluate()
        context.checkpoint()
    return context
