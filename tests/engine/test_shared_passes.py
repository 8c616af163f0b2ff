"""Prompts that share a pass answer as they do cold and alone."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlxstack.core.engine_events import RequestFailed
from mlxstack.core.errors import Unsupported
from mlxstack.core.preset import KVSpec, PrefillSpec, Preset, SlotSpec, Speculation
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Request
from mlxstack.engine import assembly, thread
from mlxstack.engine.decode.shared_passes import measure_sharing
from mlxstack.engine.loop import EngineLoop
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.engine.model.token_inputs import PlainTokens
from mlxstack.policy.pass_layout import SharedPrompts
from tests.conftest import ModelOf
from tests.engine.harness import WAIT_S, Driver, draft_freely, preset_of, prompt, running
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.mlx

PROMPTS = [prompt(n, seed=n) for n in (2, 5, 17, 33, 90, 128, 40, 300)]
MAX_SHARED = 200
PATIENT = PrefillSpec(max_stall_ms=60_000)
"""So that the speed of the machine decides nothing."""
KINDS = ["tiny", "tiny-swa", "tiny-sinks", "tiny-mla", "tiny-hybrid"]
SHARING = set(KINDS) - {"tiny-mla"}


def preset(folder: str, **changed: Any) -> Preset:
    """Eight slots for prompts that share passes."""
    slots = SlotSpec(count=8, n_ctx=1024)
    return preset_of(Path(folder), slots=slots, prefill=PATIENT, **changed)


class WithoutFives(PlainTokens):
    """Inputs of prompts but of those of five tokens."""

    def slot_tokens(self, caches: list[Any], request: Request, start: int, end: int) -> SlotTokens:
        if len(request.tokens) == 5:
            raise Unsupported("a prompt of five tokens")
        return super().slot_tokens(caches, request, start, end)


@pytest.fixture(autouse=True)
def _worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share passes whatever they cost here."""

    def measured(runner: ModelRunner, cache_factory: CacheFactory) -> SharedPrompts:
        return replace(measure_sharing(runner, cache_factory), max_tokens=MAX_SHARED)

    monkeypatch.setattr(assembly, "measure_sharing", measured)


@pytest.fixture(params=KINDS)
def driver(request: pytest.FixtureRequest, model_of: ModelOf, tmp_path: Path) -> Iterator[Driver]:
    with running(preset(model_of(request.param)), tmp_path) as driver:
        is_sharing = driver.engine.loaded.loop.prefill_policy.max_shared == MAX_SHARED
        assert is_sharing == (request.param in SHARING)
        yield driver


def together(driver: Driver, prompts: list[tuple[int, ...]], n: int = 16) -> list[str]:
    """Ids of finished requests that the engine gets between two steps."""
    asks = [
        Request(f"new-{i}", PromptTokens(tokens), n, use_cache=False)
        for i, tokens in enumerate(prompts)
    ]

    def submit(loop: EngineLoop) -> None:
        for ask in asks:
            loop.submit(ask)

    driver.engine.run(submit).result(timeout=WAIT_S)
    return [ask.id for ask in asks]


def test_an_idle_engine_waits_for_announced_requests(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "GATHER_S", PATIENCE_S)
    prompts = PROMPTS[1:4]
    alone = [driver.cold(tokens, 1) for tokens in prompts]
    began = n_passes(driver)
    for ask in together(driver, prompts, 1):
        driver.finish(ask)
    n_together = n_passes(driver) - began
    began = n_passes(driver)
    with driver.engine.announced():
        asks = [driver.submit(tokens, 1, use_cache=False) for tokens in prompts[:2]]
        wait_until(driver.engine._inbox.empty)
        asks.append(driver.submit(prompts[2], 1, use_cache=False))
    for ask in asks:
        driver.finish(ask)
    assert [driver.tokens(ask) for ask in asks] == alone
    assert n_passes(driver) - began == n_together


def n_passes(driver: Driver) -> int:
    """Passes over prompts so far."""
    return driver.engine.snapshot().counters.n_model_calls


def test_all_answer_as_alone(driver: Driver) -> None:
    began = n_passes(driver)
    alone = [driver.cold(tokens) for tokens in PROMPTS]
    before = n_passes(driver)
    asks = together(driver, PROMPTS)
    for ask in asks:
        driver.finish(ask)
    assert [driver.tokens(ask) for ask in asks] == alone
    if driver.engine.loaded.loop.prefill_policy.max_shared:
        assert n_passes(driver) - before < before - began


def test_prompts_beside_decoding_rows_answer_as_alone(driver: Driver) -> None:
    alone = [driver.cold(tokens, 40) for tokens in PROMPTS[:6]]
    first = driver.submit(PROMPTS[0], 40, use_cache=False)
    driver.seated(first)
    asks = together(driver, PROMPTS[1:6], 40)
    for ask in (first, *asks):
        driver.finish(ask)
    assert [driver.tokens(ask) for ask in (first, *asks)] == alone


def test_continued_contexts_share_a_pass(driver: Driver) -> None:
    """Turns that find their contexts bring only the rest of their prompts."""
    histories = [
        (*tokens, *driver.answer(tokens), *prompt(20, seed=len(tokens))) for tokens in PROMPTS[3:6]
    ]
    alone = [driver.cold(tokens) for tokens in histories]
    asks = [driver.submit(tokens) for tokens in histories]
    for ask in asks:
        driver.finish(ask)
    assert [driver.tokens(ask) for ask in asks] == alone


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"kv": KVSpec(bits=8, group_size=32)}, id="quantized"),
        pytest.param(
            {"kv": KVSpec(bits=8, group_size=32, quantized_start=100)}, id="quantized later"
        ),
        pytest.param({"speculation": Speculation.AUTO}, id="drafts"),
    ],
)
def test_kinds_of_kv_and_drafts(
    model_of: ModelOf, tmp_path: Path, changed: dict[str, object]
) -> None:
    with running(preset(model_of("tiny"), **changed), tmp_path) as driver:
        if "speculation" in changed:
            draft_freely(driver)
        alone = [driver.cold(tokens) for tokens in PROMPTS]
        before = n_passes(driver)
        asks = together(driver, PROMPTS)
        for ask in asks:
            driver.finish(ask)
        assert [driver.tokens(ask) for ask in asks] == alone
        assert n_passes(driver) - before < len(PROMPTS)


def test_a_prompt_that_cannot_be_fed_fails_alone(model_of: ModelOf, tmp_path: Path) -> None:
    with running(preset(model_of("tiny")), tmp_path) as driver:
        alone = [driver.cold(tokens) for tokens in PROMPTS[2:5]]
        driver.engine.loaded.loop.batch.inputs = WithoutFives()
        failed, *asks = together(driver, PROMPTS[1:5])
        error = driver.until(failed, RequestFailed).error
        for ask in asks:
            driver.finish(ask)
        assert isinstance(error, Unsupported)
        assert [driver.tokens(ask) for ask in asks] == alone


def test_a_pass_that_breaks_fails_its_prompts_and_no_other(
    model_of: ModelOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(preset(model_of("tiny")), tmp_path) as driver:
        alone = driver.cold(PROMPTS[5], 60)
        other = driver.submit(PROMPTS[5], 60, use_cache=False)
        driver.seated(other)
        runner = driver.engine.loaded.loop.batch.runner
        execute: Callable[..., object] = runner.execute

        def breaking(plan: list[SlotTokens], views: object = None) -> object:
            if len(plan) > 1 and all(slot.n_prefill for slot in plan):
                raise ValueError("a product of other shapes")
            return execute(plan, views)

        monkeypatch.setattr(runner, "execute", breaking)
        asks = together(driver, PROMPTS[1:4])
        assert all(driver.until(ask, RequestFailed) for ask in asks)
        driver.finish(other)
        assert driver.tokens(other) == alone
        monkeypatch.undo()
        assert driver.cold(PROMPTS[5], 60) == alone
