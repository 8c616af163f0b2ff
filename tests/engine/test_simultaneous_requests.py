"""Requests that arrive together begin to decode together where a decode step is slow."""

from pathlib import Path

import pytest

from mlxstack.core.engine_events import TokenSampled
from mlxstack.core.preset import SlotSpec
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Request
from mlxstack.engine.loop import EngineLoop
from mlxstack.policy.scheduling import chunked_prefill
from tests.conftest import ModelOf
from tests.engine.harness import WAIT_S, Driver, preset_of, prompt, running

pytestmark = pytest.mark.mlx

PROMPTS = [prompt(n, seed=n) for n in (90, 150, 300, 305)]


def together(driver: Driver) -> list[str]:
    """Ids of requests that the engine gets between two steps."""
    asks = [
        Request(f"new-{i}", PromptTokens(tokens), 16, use_cache=False)
        for i, tokens in enumerate(PROMPTS)
    ]

    def submit(loop: EngineLoop) -> None:
        for ask in asks:
            loop.submit(ask)

    driver.engine.run(submit).result(timeout=WAIT_S)
    return [ask.id for ask in asks]


@pytest.mark.parametrize("kind", ["tiny", "tiny-swa", "tiny-hybrid"])
def test_newcomers_begin_to_decode_in_one_step(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    preset = preset_of(Path(model_of(kind)), slots=SlotSpec(count=4, n_ctx=1024))
    # Any decode step is long for this bound.
    monkeypatch.setattr(chunked_prefill, "HEADROOM", 0.0)
    with running(preset, tmp_path) as driver:
        # The first requests of this engine: what a step takes is known from the load.
        asks = together(driver)
        for ask in asks:
            driver.finish(ask)
        alone = [driver.cold(tokens) for tokens in PROMPTS]
        sampled = [
            event.request
            for event in driver.listener.log
            if isinstance(event, TokenSampled) and event.request in asks
        ]
    assert sorted(sampled[: len(asks)]) == asks, "each has one token before any has two"
    assert [driver.tokens(ask) for ask in asks] == alone
