"""Answers that repeat themselves end in a real engine, and their thoughts are closed."""

from pathlib import Path
from typing import Any

import pytest

from mlxstack.core.engine_events import FinishReason, TokenSampled
from mlxstack.core.loops import LoopStop
from mlxstack.core.preset import SlotSpec, Speculation
from mlxstack.core.request import SamplingParams
from mlxstack.features.formats.grammar.constraint import ConstraintLayout, GrammarConstraint
from tests.engine.harness import Driver, draft_freely, preset_of, prompt, running
from tests.features.loops.sooner import MAX_SHORT, end_sooner
from tests.models import LLAMA, VOCAB, write

pytestmark = pytest.mark.mlx

PROMPT = prompt(20)
LOOPING = 9
CLOSES = (5, 6)
ALWAYS_THE_SAME = SamplingParams(logit_bias=((LOOPING, 1e6),))
NEARLY_THE_SAME = SamplingParams(temperature=1.0, seed=5, logit_bias=((LOOPING, 13.0),))
"""Another token comes first."""
THOUGHT = GrammarConstraint(ConstraintLayout(VOCAB, is_in_thinking=True, closes=CLOSES))
SLOTS = SlotSpec(count=3, n_ctx=2048)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer: the answers are long."""
    return write(tmp_path_factory.mktemp("model") / "one", LLAMA | {"num_hidden_layers": 1})


@pytest.fixture(autouse=True)
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    end_sooner(monkeypatch)


def submit(driver: Driver, seed: int, **more: Any) -> str:
    fields = {"sampling": ALWAYS_THE_SAME, "stop_loops": True, **more}
    return driver.submit(prompt(20, seed), 1400, **fields)


@pytest.mark.parametrize("speculation", [Speculation.OFF, Speculation.AUTO])
def test_answers_end_and_thoughts_are_closed(
    model: Path, tmp_path: Path, speculation: Speculation
) -> None:
    preset = preset_of(model, slots=SLOTS, speculation=speculation)
    with running(preset, tmp_path) as driver:
        if speculation is Speculation.AUTO:
            draft_freely(driver)
        answer = submit(driver, 1)
        free_thought = submit(driver, 2, thought_end=THOUGHT)
        ruled_thought = submit(driver, 3, constraint=THOUGHT)
        end = driver.finish(answer)
        assert end.reason is FinishReason.LOOP
        assert driver.tokens(answer) == [LOOPING] * MAX_SHORT
        assert end.timings.loops == (LoopStop(0, 1, MAX_SHORT),)
        assert bool(end.timings.n_drafted) is (speculation is Speculation.AUTO)
        for thought in (free_thought, ruled_thought):
            end = driver.finish(thought)
            assert end.reason is FinishReason.LOOP
            closed, ended = end.timings.loops
            assert closed == LoopStop(0, 1, MAX_SHORT, is_thought=True)
            tokens = driver.tokens(thought)
            at = tokens.index(CLOSES[0])
            # Tokens that were already computed come before.
            assert MAX_SHORT <= at <= MAX_SHORT + 18
            assert tokens[at : at + 2] == list(CLOSES)
            assert tokens.count(LOOPING) == len(tokens) - 2
            assert ended == LoopStop(at + 2, 1, MAX_SHORT)
            assert len(tokens) == at + 2 + MAX_SHORT


def test_copies_of_the_prompt_go_on(model: Path, tmp_path: Path) -> None:
    run = (LOOPING,) * (MAX_SHORT + 28)
    with running(preset_of(model, slots=SLOTS), tmp_path) as driver:
        copied = driver.submit((*PROMPT, *run), len(run), sampling=ALWAYS_THE_SAME, stop_loops=True)
        expected = submit(driver, 2, prediction=run)
        free = driver.submit(prompt(20, 3), MAX_SHORT + 20, sampling=ALWAYS_THE_SAME)
        assert driver.finish(copied).reason is FinishReason.LENGTH
        assert driver.finish(expected).reason is FinishReason.LOOP
        assert len(run) < len(driver.tokens(expected)) <= len(run) + 64
        assert driver.finish(free).reason is FinishReason.LENGTH


@pytest.mark.parametrize("speculation", [Speculation.OFF, Speculation.AUTO])
def test_tokens_before_the_end_are_those_without_the_rule(
    model: Path, tmp_path: Path, speculation: Speculation
) -> None:
    preset = preset_of(model, slots=SLOTS, speculation=speculation)
    with running(preset, tmp_path) as driver:
        if speculation is Speculation.AUTO:
            draft_freely(driver)
        ended = driver.submit(PROMPT, 1400, sampling=NEARLY_THE_SAME, stop_loops=True)
        free = driver.submit(PROMPT, 1400, sampling=NEARLY_THE_SAME)
        end = driver.finish(ended)
        assert end.reason is FinishReason.LOOP
        tokens = driver.tokens(ended)
        driver.until(free, TokenSampled, len(tokens) + 1)
        driver.engine.cancel(free)
        (stop,) = end.timings.loops
        assert 0 < stop.at == len(tokens) - MAX_SHORT
        assert driver.tokens(free)[: len(tokens)] == tokens
