"""Answers that take long have their cache headers too, in every dialect."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxstack.api import run_generation
from mlxstack.core.engine_events import (
    CacheMiss,
    FinishReason,
    KVSource,
    RequestFinished,
    RequestTimings,
    SlotAssigned,
)
from mlxstack.core.preset import ServerSpec
from tests.api.running import Running, running, tiny_preset
from tests.gateway.gateway_thread import WAYS, standing_behind
from tests.patience import PATIENCE_S, wait_until
from tests.service.standin import StandIn

pytestmark = pytest.mark.net

TEXT = "Tell me about rivers, and about the towns on their banks. " * 8
MESSAGES = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": MESSAGES,
    "/v1/completions": {"prompt": TEXT, "max_tokens": 4},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 4},
    "/v1/messages": MESSAGES,
    "/api/chat": {**MESSAGES, "options": {"num_predict": 4}},
    "/api/generate": {"prompt": TEXT, "options": {"num_predict": 4}},
    "/completion": {"prompt": TEXT, "n_predict": 4},
}
FIGURES = (
    "cache-hit", "cache-prefix-tokens", "cache-new-tokens", "ttft-saved-ms", "cache-miss-reason",
    "cache-lost-tokens", "cache-lost-ms", "slot",
)  # fmt: skip
MISS = CacheMiss("diverged", 50, n_lost=10)

every_dialect = pytest.mark.parametrize("path", BODIES)
whole_or_not = pytest.mark.parametrize("is_stream", [False, True])


def headers_of(answer: httpx.Response) -> dict[str, str]:
    """Its headers that are ours, without their prefix."""
    prefix = "x-mlx-stack-"
    return {k.removeprefix(prefix): v for k, v in answer.headers.items() if k.startswith(prefix)}


def body_of(path: str, is_stream: bool) -> dict[str, Any]:
    return {**BODIES[path], "stream": is_stream}


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A real model whose prompts are computed in many small steps."""
    folder = tmp_path_factory.mktemp("late")
    with running(tiny_preset(folder / "tiny"), folder / "home") as found:
        yield found


@pytest.mark.mlx
@every_dialect
@whole_or_not
def test_the_head_of_a_late_answer_has_the_figures_of_the_cache(
    slow_model: Running, path: str, is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every answer is late: its head goes out as soon as the lookup is done.
    monkeypatch.setattr(run_generation, "EARLY_S", 0.0)
    monkeypatch.setattr(run_generation, "LOOKUP_S", PATIENCE_S)
    url = slow_model.url + path
    for _ in range(2):
        answer = httpx.post(url, json=body_of(path, is_stream), timeout=PATIENCE_S)
        assert answer.status_code == 200
    found = headers_of(answer)
    n_prompt = int(found["cache-prefix-tokens"]) + int(found["cache-new-tokens"])
    assert (found["cache-hit"], n_prompt > 20, found["slot"].isdigit()) == ("true", True, True)
    assert int(found["ttft-saved-ms"]) >= 0


@pytest.fixture(params=WAYS)
def queueing(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, StandIn]]:
    """A service whose requests get their slots when the test says so."""
    monkeypatch.setattr(run_generation, "EARLY_S", 0.0)
    monkeypatch.setattr(run_generation, "BEAT_S", 0.05)
    with standing_behind(request.param, ServerSpec(port=0), tmp_path) as (found, engine):
        engine.is_queueing = True
        yield found.url, engine


def assign(engine: StandIn) -> None:
    asked = wait_until(lambda: engine.asked)[-1]
    slot = SlotAssigned(
        asked.id, 1, len(asked.tokens), 40, KVSource.SLOT, MISS, expected_s=2.0, saved_s=1.5
    )
    engine.deliver((slot,))


def finish(engine: StandIn) -> None:
    asked = engine.asked[-1]
    work = RequestTimings(n_prompt=len(asked.tokens), n_cached=40)
    engine.deliver((RequestFinished(asked.id, FinishReason.EOS, work),))


def stream(
    url: str, body: dict[str, Any], then: Callable[[httpx.Response], None]
) -> tuple[httpx.Response, str]:
    """An answer and its text; `then` is called when its head is there."""
    with httpx.stream("POST", url, json=body, timeout=PATIENCE_S) as answer:
        then(answer)
        return answer, "".join(answer.iter_text())


@every_dialect
@whole_or_not
def test_the_head_of_a_queued_answer_waits_for_the_lookup(
    queueing: tuple[str, StandIn], path: str, is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, engine = queueing
    monkeypatch.setattr(run_generation, "LOOKUP_S", PATIENCE_S)
    has_head = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(stream, url + path, body_of(path, is_stream), lambda _: has_head.set())
        assign(engine)
        wait_until(has_head.is_set)
        finish(engine)
        answer, _ = asking.result(PATIENCE_S)
    found = headers_of(answer)
    assert [name for name in FIGURES if name not in found] == []
    assert (found["cache-prefix-tokens"], found["ttft-saved-ms"]) == ("40", "1500")
    assert found["cache-miss-reason"] == "diverged at token 50"


@every_dialect
@whole_or_not
def test_an_answer_that_waits_longer_has_its_figures_in_its_usage(
    queueing: tuple[str, StandIn], path: str, is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, engine = queueing
    monkeypatch.setattr(run_generation, "LOOKUP_S", 0.05)
    body = body_of(path, is_stream)
    if path.endswith("completions"):
        body["stream_options"] = {"include_usage": True}

    def give_slot(answer: httpx.Response) -> None:
        assert set(headers_of(answer)).isdisjoint(FIGURES)
        assign(engine)
        finish(engine)

    _, text = stream(url + path, body, give_slot)
    reused = {
        "/v1/messages": '"cache_read_input_tokens":40',
        "/api/chat": '"prompt_eval_count":',
        "/api/generate": '"prompt_eval_count":',
        "/completion": '"cache_n":40',
    }.get(path, '"cached_tokens":40')
    assert reused in text.replace(": ", ":")
    if not is_stream:
        assert json.loads(text)
