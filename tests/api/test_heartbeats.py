"""A door that does not tell how far a prompt is beats all the while that it is computed."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
import pytest

from mlxstack.api import run_generation
from mlxstack.core.engine_events import (
    FinishReason,
    PrefillProgress,
    RequestFinished,
    RequestTimings,
)
from mlxstack.core.preset import ServerSpec
from tests.api.running import serving, standing
from tests.patience import PATIENCE_S
from tests.service.standin import FACTS, StandIn

pytestmark = pytest.mark.net

HELLO = [{"role": "user", "content": "hello"}]


class Stage(NamedTuple):
    """A service whose engine computes prompts for as long as the test wants."""

    url: str
    engine: StandIn


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(run_generation, "LOOKUP_S", 0.05)
    monkeypatch.setattr(run_generation, "BEAT_S", 0.05)
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    engine.script = None
    with socket.create_server(("127.0.0.1", 0)) as listener, serving(service, listener) as found:
        yield Stage(found.url, engine)


def compute(engine: StandIn, is_enough: threading.Event) -> None:
    """Progress, many times between two heartbeats, until it is enough; then the end."""
    ask = engine.asked[-1]
    while not is_enough.wait(0.001):
        engine.deliver((PrefillProgress(ask.id, 50, 100),))
    engine.deliver((RequestFinished(ask.id, FinishReason.EOS, RequestTimings(n_prompt=100)),))


@pytest.mark.parametrize(
    ("path", "body", "beat"),
    [
        ("/v1/messages", {"messages": HELLO, "max_tokens": 4}, "event: ping"),
        ("/v1/responses", {"input": "hello"}, "event: response.in_progress"),
        ("/v1/completions", {"prompt": "hello"}, ": keepalive"),
        ("/api/chat", {"messages": HELLO}, " "),
    ],
)
def test_x20_progress_that_a_door_does_not_tell_stops_no_heartbeat(
    stage: Stage, path: str, body: dict[str, Any], beat: str
) -> None:
    wanted = {**body, "stream": True, "return_progress": True}
    text = ""
    is_enough = threading.Event()
    with (
        ThreadPoolExecutor(1) as pool,
        httpx.stream("POST", stage.url + path, json=wanted, timeout=PATIENCE_S) as found,
    ):
        computing = pool.submit(compute, stage.engine, is_enough)
        try:
            for piece in found.iter_text():
                text += piece
                if text.count(beat) > 5:
                    is_enough.set()
        finally:
            is_enough.set()
        computing.result(PATIENCE_S)
    assert text.count(beat) > 5
