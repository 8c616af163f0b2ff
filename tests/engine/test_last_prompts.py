"""The last prompts of conversations: few bytes per token, inside the KV budget."""

from array import array
from pathlib import Path

import pytest

from mlxstack.core.preset import PrefixCacheSpec
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Request
from mlxstack.engine.slots.prefix_lookup import PROMPT_SHARE, PrefixLookup
from mlxstack.engine.slots.slot_kv_manager import SlotKVManager
from tests.conftest import ModelOf
from tests.engine.harness import WAIT_S, Driver, preset_of, prompt, running

pytestmark = pytest.mark.mlx

N_TOKENS = 20_000
MEMORY_BYTES = 100 << 20


def seating_of(driver: Driver) -> SlotKVManager:
    return driver.engine.loaded.loop.slot_kv


def remember(driver: Driver, n_conversations: int) -> PrefixLookup:
    finding = seating_of(driver).lookup
    for number in range(n_conversations):
        tokens = tuple(range(number, number + N_TOKENS))
        ask = Request(f"ask-{number}", PromptTokens(tokens), 1, display_name=f"chat-{number}")
        driver.engine.run(lambda _, ask=ask: finding.remember(ask)).result(WAIT_S)
    return finding


def test_f8_last_prompts_are_bounded_by_bytes_and_part_of_the_budget(
    model_of: ModelOf, tmp_path: Path
) -> None:
    with running(preset_of(model_of("tiny")), tmp_path, MEMORY_BYTES) as driver:
        seating = seating_of(driver)
        finding = remember(driver, 60)
        before = seating.live_bytes
        kept = [last for n in range(60) if (last := finding.last(f"chat-{n}"))]
        assert 5 < len(kept) < 60
        assert finding.last("chat-59") in kept, "the oldest go first"
        assert all(isinstance(one.tokens, array) and one.tokens.itemsize == 4 for one in kept)
        n_bytes = sum(one.n_bytes for one in kept)
        assert 4 * N_TOKENS * len(kept) < n_bytes == finding.n_bytes == before
        assert n_bytes <= seating.prefix_cache.budget / PROMPT_SHARE
        for n in range(60):
            finding.forget(f"chat-{n}")
        assert finding.n_bytes == 0 == seating.live_bytes


def test_f8_the_newest_prompt_is_remembered_however_small_the_budget(
    model_of: ModelOf, tmp_path: Path
) -> None:
    share = PrefixCacheSpec(memory_budget_pct=10)
    preset = preset_of(model_of("tiny"), prefix_cache=share)
    with running(preset, tmp_path, 4 << 20) as driver:
        finding = remember(driver, 3)
        assert [finding.last(f"chat-{n}") is not None for n in range(3)] == [False, False, True]


def test_d16_a_divergence_is_told_from_a_remembered_prompt(
    model_of: ModelOf, tmp_path: Path
) -> None:
    with running(preset_of(model_of("tiny")), tmp_path) as driver:
        head = prompt(300, seed=1)
        driver.answer(head + prompt(200, seed=2), 2, display_name="chat-1")
        ask = driver.submit(head + prompt(200, seed=3), 2, display_name="chat-1")
        driver.finish(ask)
        miss = driver.seated(ask).miss
        assert miss is not None and miss.at == 300
        assert miss.instead == prompt(200, seed=2)[:24]
