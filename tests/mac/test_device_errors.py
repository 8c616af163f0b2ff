"""Errors of the GPU: requests in slots fail, their KV is dropped; the engine goes on or ends."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxstack.core.engine_events import KVSource, TokenSampled
from mlxstack.core.errors import Broken, Busy, DeviceError
from mlxstack.core.preset import AgentsSpec, ModelSpec, Persist, Preset, ServiceKind, SlotSpec
from mlxstack.engine.device_errors import device_error
from mlxstack.engine.embedding_engine import EmbeddingEngine
from tests.api.running import Running, tiny_preset
from tests.api.running import running as serving
from tests.conftest import ModelOf
from tests.engine.harness import WAIT_S, Driver, preset_of, prompt, running
from tests.mac.device_faults import (
    DENIED,
    FOR_EVER,
    INTERACTIVITY,
    OUT_OF_MEMORY,
    TIMEOUT,
    DeviceFaults,
)
from tests.patience import PATIENCE_S, wait_until
from tests.repetition import in_soak

pytestmark = pytest.mark.mlx

SAVED = prompt(200)
LATER = (*SAVED, *prompt(20, seed=9))


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> DeviceFaults:
    return DeviceFaults(monkeypatch.setattr)


def keeping(model: Path, **more: Any) -> Preset:
    """Two slots, and agents that are saved after each turn."""
    slots = SlotSpec(count=2, n_ctx=1024)
    return preset_of(model, slots=slots, agents=AgentsSpec(persist=Persist.AFTER_TURN), **more)


def outcome(driver: Driver, ask: str) -> list[int] | None:
    """Tokens of a request, or None for one that a device error ended."""
    try:
        driver.finish(ask)
    except DeviceError:
        return None
    return driver.tokens(ask)


def wait_until_dead(driver: Driver) -> None:
    driver.engine._thread.join(PATIENCE_S)
    assert not driver.engine.is_alive()


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        ("tiny", 0),
        ("tiny-hybrid", 0),
        ("tiny-swa", 2),
        ("tiny", 5),
        ("tiny-hybrid", 5),
        ("tiny-swa", 13),
        *in_soak(
            ("tiny-swa", 0),
            ("tiny", 2),
            ("tiny-hybrid", 2),
            ("tiny-swa", 5),
            ("tiny", 13),
            ("tiny-hybrid", 13),
        ),
    ],
)
def test_after_one_error_all_answers_are_as_cold(
    kind: str, after: int, model_of: ModelOf, faults: DeviceFaults, tmp_path: Path
) -> None:
    prompts = [LATER, prompt(150, seed=1)]
    with running(keeping(model_of(kind)), tmp_path) as driver:
        cold = [driver.cold(tokens, 12) for tokens in prompts]
        driver.answer(SAVED, 4, agent="saved")
        driver.catch_up()
        faults.fail(after=after)
        asks = [driver.submit(tokens, 12, agent=f"a{n}") for n, tokens in enumerate(prompts)]
        for ask, alone in zip(asks, cold, strict=True):
            assert outcome(driver, ask) in (None, alone)
        assert faults.n_raised == 1
        for tokens, alone in zip(prompts, cold, strict=True):
            assert driver.answer(tokens, 12) == alone
        assert driver.engine.is_alive()
    with running(keeping(model_of(kind)), tmp_path) as driver:
        for n, (tokens, alone) in enumerate(zip(prompts, cold, strict=True)):
            assert driver.answer(tokens, 12, agent=f"a{n}") == alone


def test_all_rows_fail_and_their_kv_is_dropped(
    model_of: ModelOf, faults: DeviceFaults, tmp_path: Path
) -> None:
    with running(keeping(model_of("tiny")), tmp_path) as driver:
        asks = [driver.submit(prompt(90, seed=n), 400, slot=n) for n in range(2)]
        for ask in asks:
            driver.until(ask, TokenSampled, 5)
        faults.fail()
        for ask in asks:
            with pytest.raises(DeviceError, match=r"prefill\.chunk_size"):
                driver.finish(ask)
        assert [driver.context(slot) for slot in range(2)] == [(), ()]
        assert driver.engine.loaded.loop.slot_kv.prefix_cache.index.nodes == {}
        again = driver.submit(prompt(90), 4)
        driver.finish(again)
        assert driver.seated(again).source is KVSource.NONE


def test_an_idle_slot_and_a_waiting_request_survive_an_error(
    model_of: ModelOf, faults: DeviceFaults, tmp_path: Path
) -> None:
    with running(keeping(model_of("tiny")), tmp_path) as driver:
        cold = driver.cold(prompt(60, seed=5), 6)
        driver.answer(SAVED, 4, slot=1)
        idle_tokens = driver.context(1)
        driver.answer(prompt(30, seed=4), 4, slot=0)
        ask = driver.submit(prompt(90, seed=1), 400, slot=0)
        driver.until(ask, TokenSampled, 5)
        waiting = driver.submit(prompt(60, seed=5), 6, slot=0)
        faults.fail()
        assert outcome(driver, ask) is None
        assert outcome(driver, waiting) == cold
        assert driver.context(1) == idle_tokens


def test_two_errors_with_an_answer_between_them_end_nothing(
    model_of: ModelOf, faults: DeviceFaults, tmp_path: Path
) -> None:
    with running(keeping(model_of("tiny")), tmp_path) as driver:
        for n in range(3):
            # Saving the answer before would take the error.
            driver.catch_up()
            faults.fail()
            assert outcome(driver, driver.submit(prompt(90, seed=n), 8)) is None
            assert driver.answer(prompt(50, seed=n), 4)
        assert driver.engine.is_alive()


@pytest.mark.parametrize("after", [0, 3, 20])
def test_a_gpu_that_stays_broken_ends_the_engine_and_loses_nothing_on_disk(
    after: int, model_of: ModelOf, faults: DeviceFaults, tmp_path: Path
) -> None:
    with running(keeping(model_of("tiny")), tmp_path) as driver:
        cold = driver.cold(LATER, 8)
        driver.answer(SAVED, 4, agent="saved")
        driver.catch_up()
        faults.fail(FOR_EVER, after=after, text=DENIED)
        # An idle engine releases buffers, which fails too.
        for n in range(2):
            driver.submit(prompt(90, seed=n), 400, slot=n)
        wait_until_dead(driver)
        assert "SubmissionsIgnored" in driver.engine.trouble
        faults.fail(0)
    with running(keeping(model_of("tiny")), tmp_path) as driver:
        later = driver.submit(LATER, 8, agent="saved")
        assert outcome(driver, later) == cold
        assert driver.seated(later).source is KVSource.DISK


def test_decode_steps_that_always_fail_end_the_engine_although_prompts_are_computed(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import mlx.core as mx

    def fail(*_: object) -> None:
        raise RuntimeError(TIMEOUT)

    with running(keeping(model_of("tiny")), tmp_path) as driver:
        monkeypatch.setattr(mx, "async_eval", fail)
        assert outcome(driver, driver.submit(prompt(90), 8)) is None
        driver.submit(prompt(90, seed=1), 8)
        wait_until_dead(driver)


def test_an_error_that_surfaces_while_kv_is_saved_fails_the_rows(
    model_of: ModelOf, faults: DeviceFaults, tmp_path: Path
) -> None:
    from mlxstack.core.commands import SaveSlot

    with running(keeping(model_of("tiny")), tmp_path) as driver:
        driver.answer(SAVED, 4, slot=1)
        driver.catch_up()
        faults.fail()
        with pytest.raises(Broken, match="GPU Timeout"):
            driver.engine.run_slot_command(SaveSlot(1, "one.bin")).result(WAIT_S)
        assert not (tmp_path / "slots" / "one.bin").exists()
        assert driver.answer(LATER, 4) == driver.cold(LATER, 4)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (OUT_OF_MEMORY, "lower prefix_cache.memory_budget_pct"),
        (INTERACTIVITY, "keep the display on"),
        (TIMEOUT, "keep the display on"),
        (DENIED, "starts a new process"),
        ("cudaGraphLaunch(...) failed: out of memory", "lower prefix_cache.memory_budget_pct"),
        ("[CUDA] an illegal memory access was encountered", "starts a new process"),
    ],
)
def test_the_remedy_follows_from_the_text_of_the_error(text: str, remedy: str) -> None:
    failure = device_error(RuntimeError(text))
    assert failure is not None
    assert text in failure.message
    assert remedy in failure.message


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[metal::malloc] Attempting to allocate 5 bytes"),
        RuntimeError("[concatenate] shapes differ"),
        ValueError(TIMEOUT),
        Busy("all slots are busy"),
    ],
)
def test_other_errors_are_no_device_errors(error: Exception) -> None:
    assert device_error(error) is None


def test_an_error_while_the_model_loads_is_no_error_of_the_setup(
    model_of: ModelOf, faults: DeviceFaults, tmp_path: Path
) -> None:
    faults.fail(FOR_EVER)
    with pytest.raises(DeviceError), running(keeping(model_of("tiny")), tmp_path):
        pass


def test_an_embedding_engine_ends_after_two_errors(model_of: ModelOf, faults: DeviceFaults) -> None:
    model = ModelSpec(id=str(model_of("tiny")))
    engine = EmbeddingEngine(Preset(model=model, kind=ServiceKind.EMBEDDING))
    engine.start().result(WAIT_S)
    vector = engine.embed(((1, 2, 3),)).result(WAIT_S)
    for _ in range(2):
        faults.fail()
        with pytest.raises(DeviceError):
            engine.embed(((1, 2, 3),)).result(WAIT_S)
        if engine.is_alive():
            assert engine.embed(((1, 2, 3),)).result(WAIT_S) == vector
    faults.fail(FOR_EVER)
    for _ in range(2):
        with pytest.raises(DeviceError):
            engine.embed(((1, 2, 3),)).result(WAIT_S)
    engine._thread.join(WAIT_S)
    assert not engine.is_alive()
    assert "GPU Timeout" in engine.trouble


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Running]:
    with serving(tiny_preset(tmp_path / "model"), tmp_path / "home") as live:
        yield live


HI = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 8},
    "/v1/completions": {"prompt": "hi", "max_tokens": 8},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
    "/v1/responses": {"input": "hi", "max_output_tokens": 8},
    "/completion": {"prompt": "hi", "n_predict": 8},
    "/api/chat": {"messages": HI, "model": "tiny", "options": {"num_predict": 8}},
}


def rest(service: Running) -> None:
    """Wait until the engine has released its buffers after the last request."""
    wait_until(lambda: not service.service.engine._has_work)


def broken(
    service: Running, faults: DeviceFaults, path: str, body: dict[str, Any]
) -> httpx.Response:
    """The response to a request that a fault met.

    Work after a request, such as writing its KV, may meet the fault instead.
    """
    for _ in range(20):
        rest(service)
        faults.fail()
        response = httpx.post(service.url + path, json=body, timeout=WAIT_S)
        if "kIOGPUCommandBufferCallbackErrorTimeout" in response.text:
            return response
        assert response.status_code == 200, response.text
    raise AssertionError(f"no fault met a request: {path}")


def test_every_dialect_tells_the_error_and_serves_again(
    service: Running, faults: DeviceFaults
) -> None:
    with httpx.Client(base_url=service.url, timeout=WAIT_S) as http:
        for path, body in BODIES.items():
            for is_stream in (False, True):
                response = broken(service, faults, path, {**body, "stream": is_stream})
                assert response.status_code == 500 or is_stream, path
                assert http.post(path, json={**body, "stream": False}).status_code == 200
        assert http.get("/health").status_code == 200


def test_requests_of_a_dead_engine_are_answered_before_the_service_ends(
    service: Running, faults: DeviceFaults
) -> None:
    rest(service)
    faults.fail(FOR_EVER)
    with httpx.Client(base_url=service.url, timeout=PATIENCE_S) as http:
        body = BODIES["/v1/chat/completions"]
        assert http.post("/v1/chat/completions", json=body).status_code in (500, 503)
        # Faults may meet work between two requests; the service stops then.
        assert http.post("/v1/chat/completions", json=body).status_code in (500, 503)
        service.service.engine._thread.join(WAIT_S)  # type: ignore[union-attr]
    assert "GPU did not finish" in service.service.engine.trouble
