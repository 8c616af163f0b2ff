"""Request bodies: compressed ones, their common budget, and answers that begin early."""

import asyncio
import gc
import gzip
import importlib
import json
import select
import socket
import threading
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxstack.api import run_generation, swap_middleware
from mlxstack.api.request_body import DECODERS, TRIMMED_BYTES, BodyBudget
from mlxstack.core.engine_events import (
    FinishReason,
    PrefillProgress,
    RequestFailed,
    RequestFinished,
    RequestTimings,
)
from mlxstack.core.errors import Broken, OutOfMemory
from mlxstack.core.preset import ServerSpec
from tests.api.requests import chat_body
from tests.api.running import Running, tiny_preset
from tests.api.test_connection_limits import until
from tests.gateway.gateway_thread import WAYS, running_behind, standing_behind
from tests.patience import PATIENCE_S
from tests.patience import until as until_fact
from tests.service.standin import StandIn

pytestmark = [pytest.mark.mlx, pytest.mark.net]

CHAT = "/v1/chat/completions"
LIMIT = 200_000
BUDGET = 500_000
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module", params=WAYS)
def here(
    request: pytest.FixtureRequest, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    server = ServerSpec(port=0, max_body_bytes=LIMIT, max_bodies_bytes=BUDGET)
    preset = tiny_preset(model_folder, server=server)
    with running_behind(request.param, preset, tmp_path_factory.mktemp("bodies")) as found:
        yield found


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def zstd(data: bytes) -> bytes:
    name = "compression.zstd" if importlib.util.find_spec("compression") else "backports.zstd"
    packed: bytes = pytest.importorskip(name).compress(data)
    return packed


def in_parts(pack: Any) -> Any:
    """Members or frames in a row, one of them empty."""
    return lambda data: pack(data[:30]) + pack(b"") + pack(data[30:])


PACKERS: dict[str, Any] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP": gzip.compress,
    "deflate": zlib.compress,
    "deflate raw": raw_deflate,
    "zstd": zstd,
    "identity": bytes,
    "identity,gzip": gzip.compress,
    "gzip,gzip": lambda data: gzip.compress(gzip.compress(data)),
    "deflate,gzip": lambda data: gzip.compress(zlib.compress(data)),
    "gzip parts": in_parts(gzip.compress),
    "zstd parts": in_parts(zstd),
}


@pytest.mark.parametrize("name", PACKERS)
def test_a_compressed_body_is_decoded(here: Running, name: str) -> None:
    data = PACKERS[name](json.dumps(chat_body("tell " * 9000)).encode())
    headers = {**JSON, "content-encoding": name.partition(" ")[0]}
    chunks = (data[at : at + 99] for at in range(0, len(data), 99))
    for content in (data, chunks):
        answer = httpx.post(here.url + CHAT, content=content, headers=headers, timeout=PATIENCE_S)
        assert answer.status_code == 400 and "9009 tokens" in answer.text
    short = PACKERS[name](json.dumps(chat_body()).encode())
    answer = httpx.post(here.url + CHAT, content=short, headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("coding", ["br", "compress", "gzip, br", "gzip, gzip, gzip", "aes128gcm"])
def test_an_unknown_coding_is_a_415_that_names_the_known_ones(here: Running, coding: str) -> None:
    headers = {**JSON, "content-encoding": coding}
    for path in (CHAT, "/v1/messages", "/api/chat"):
        answer = httpx.post(here.url + path, content=b"{}", headers=headers)
        assert answer.status_code == 415 and coding in answer.text
        assert answer.headers["accept-encoding"].startswith("gzip, deflate")


@pytest.mark.parametrize("name", ["gzip", "deflate", "deflate raw", "zstd", "gzip,gzip"])
def test_a_body_that_decodes_to_more_than_the_limit_is_a_413(here: Running, name: str) -> None:
    bomb = PACKERS[name](b" " * 50_000_000)
    assert len(bomb) < LIMIT
    headers = {**JSON, "content-encoding": name.removesuffix(" raw")}
    answer = httpx.post(here.url + CHAT, content=bomb, headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 413 and "max_body_bytes" in answer.text


@pytest.mark.parametrize("name", ["gzip", "deflate", "zstd"])
def test_a_body_that_is_not_what_its_coding_says_is_a_400(here: Running, name: str) -> None:
    whole = PACKERS[name](json.dumps(chat_body()).encode())
    empty = PACKERS[name](b"") * 1001 if name != "deflate" else b"?"
    for content in (b"{}", b"", whole[: len(whole) // 2], b"\x00" * 99, empty):
        headers = {**JSON, "content-encoding": name}
        answer = httpx.post(here.url + CHAT, content=content, headers=headers)
        assert answer.status_code == 400 and name in answer.text


@pytest.mark.parametrize("path", ["/slots/0?action=erase", "/api/embed", CHAT])
def test_a_body_that_no_route_reads_leaves_no_traceback(
    here: Running, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    headers = {**JSON, "content-encoding": "gzip"}
    answer = httpx.post(here.url + path, content=b"{}", headers=headers, timeout=PATIENCE_S)
    assert answer.status_code < 500, answer.text
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_every_decoder_is_named_in_the_tests() -> None:
    assert set(DECODERS) <= {name.lower() for name in PACKERS}


class Cycle:
    """An object in a cycle, which the collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_bodies_one_after_the_other_free_the_cycles_that_they_left(without_collector: None) -> None:
    async def many() -> None:
        budget = BodyBudget(TRIMMED_BYTES)
        cycle = weakref.ref(Cycle())
        for _ in range(9):
            budget.take(TRIMMED_BYTES // 8)
            budget.give_back(TRIMMED_BYTES // 8)
        await until_fact(lambda: cycle() is None, "no full collection came")

    asyncio.run(many())


def half_sent(here: Running, n_bytes: int) -> socket.socket:
    """A request whose body lacks its last byte."""
    found = socket.create_connection(
        ("127.0.0.1", httpx.URL(here.url).port or 0), timeout=PATIENCE_S
    )
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    found.sendall(f"{head}Content-Length: {n_bytes + 1}\r\n\r\n".encode() + b" " * n_bytes)
    return found


def status(here: Running) -> int:
    """Answer to a body that does not fit beside two half-sent ones."""
    return httpx.post(
        here.url + CHAT, json=chat_body("x" * 150_000), timeout=PATIENCE_S
    ).status_code


@contextmanager
def two_held(here: Running) -> Iterator[list[socket.socket]]:
    """Two half-sent bodies in the budget; one that came beside that of `status` is sent again."""
    held = [half_sent(here, 190_000) for _ in range(2)]

    def are_held() -> bool:
        for i, one in enumerate(held):
            if select.select([one], [], [], 0)[0]:
                one.close()
                held[i] = half_sent(here, 190_000)
        return status(here) == 503

    try:
        until(are_held)
        yield held
    finally:
        for one in held:
            one.close()


def test_bodies_in_flight_share_a_budget_which_is_given_back(here: Running) -> None:
    for _ in range(3):
        with two_held(here):
            refused = httpx.post(
                here.url + "/v1/messages", json=chat_body("x" * 150_000), timeout=PATIENCE_S
            )
            assert refused.status_code == 529 and int(refused.headers["retry-after"]) >= 1
            assert "max_bodies_bytes" in refused.text
            small = httpx.post(here.url + CHAT, json=chat_body(), timeout=PATIENCE_S)
            assert small.status_code == 200, "a body that fits is served"
        until(lambda: status(here) == 400)
    with two_held(here) as [first, _]:
        first.sendall(b" ")
        assert first.recv(65536).startswith(b"HTTP/1.1 400"), "it was there first"
        until(lambda: status(here) == 400)


def test_json_that_ends_early_is_told_by_its_last_byte(here: Running) -> None:
    for path in (CHAT, "/v1/messages", "/v1/responses", "/api/chat", "/completion"):
        answer = httpx.post(here.url + path, content=b"{", headers=JSON)
        assert answer.status_code == 400
        assert "the body is not JSON: it ends at byte 1" in answer.text
        answer = httpx.post(here.url + path, content=b'{"a": x}', headers=JSON)
        assert answer.status_code == 400 and "the body is not JSON" in answer.text


@pytest.fixture(params=WAYS)
def silent(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Running, StandIn]]:
    """A service whose engine answers only when the test does."""
    for module in (run_generation, swap_middleware):
        monkeypatch.setattr(module, "EARLY_S", 0.05)
        monkeypatch.setattr(module, "BEAT_S", 0.05)
    with standing_behind(request.param, ServerSpec(port=0), tmp_path) as (found, engine):
        engine.script = None
        yield found, engine


SILENT = {
    "messages": [{"role": "user", "content": "Hi"}],
    "input": "Hi",
    "prompt": "Hi",
    "stream": False,
    "max_tokens": 4,
}
RESPONSES = {name: value for name, value in SILENT.items() if name != "prompt"}
"""A body of the Responses API, where `prompt` is a stored one."""
WHOLE = [CHAT, "/v1/messages", "/v1/responses", "/v1/completions", "/api/chat", "/completion"]


def silent_body(path: str) -> dict[str, Any]:
    return RESPONSES if path == "/v1/responses" else SILENT


@pytest.mark.parametrize("path", WHOLE)
def test_a_whole_answer_that_is_late_begins_with_white_space(
    silent: tuple[Running, StandIn], path: str
) -> None:
    here, engine = silent
    with httpx.stream(
        "POST", here.url + path, json=silent_body(path), timeout=PATIENCE_S
    ) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("application/json")
        pieces = answer.iter_bytes()
        assert b"".join(next(pieces) for _ in range(3)).isspace()
        asked = engine.asked[-1]
        n = len(asked.tokens)
        work = RequestTimings(n_prompt=n, n_generated=0)
        engine.deliver((PrefillProgress(asked.id, n, n),))
        engine.deliver((RequestFinished(asked.id, FinishReason.EOS, work),))
        assert "model" in json.loads(b"".join(pieces))


@pytest.mark.parametrize("path", WHOLE)
def test_a_failure_after_the_white_space_is_an_error_of_the_dialect(
    silent: tuple[Running, StandIn], path: str
) -> None:
    here, engine = silent
    with httpx.stream(
        "POST", here.url + path, json=silent_body(path), timeout=PATIENCE_S
    ) as answer:
        pieces = answer.iter_bytes()
        assert next(pieces).isspace()
        engine.deliver((RequestFailed(engine.asked[-1].id, OutOfMemory("no room for it")),))
        assert "no room for it" in json.dumps(json.loads(b"".join(pieces))["error"])


@pytest.mark.parametrize("path", WHOLE)
def test_a_late_answer_ends_its_work_when_the_client_leaves(
    silent: tuple[Running, StandIn], path: str
) -> None:
    here, engine = silent
    with httpx.stream(
        "POST", here.url + path, json=silent_body(path), timeout=PATIENCE_S
    ) as answer:
        assert next(answer.iter_bytes()).isspace()
    until(lambda: engine.cancelled == [engine.asked[-1].id])


@pytest.mark.parametrize("path", WHOLE)
def test_a_whole_answer_begins_while_the_model_is_changed(
    silent: tuple[Running, StandIn], path: str
) -> None:
    here, engine = silent
    engine.script = ()
    for is_failed in (False, True):
        here.loop.call_soon_threadsafe(here.service.gate.close)
        until(lambda: here.service.gate.is_closed)
        with httpx.stream(
            "POST", here.url + path, json=silent_body(path), timeout=PATIENCE_S
        ) as answer:
            pieces = answer.iter_bytes()
            assert next(pieces).isspace()
            if is_failed:
                error = Broken("the other model does not load")
                here.loop.call_soon_threadsafe(here.service.gate.interrupt, error)
            here.loop.call_soon_threadsafe(here.service.gate.open)
            found = json.loads(b"".join(pieces))
        assert ("does not load" in json.dumps(found)) == is_failed


def test_other_answers_do_not_begin_early(silent: tuple[Running, StandIn]) -> None:
    here, _ = silent
    here.loop.call_soon_threadsafe(here.service.gate.close)
    until(lambda: here.service.gate.is_closed)
    waiting = here.service.gate._requests
    asked: list[httpx.Response] = []
    body = {"content": "hi"}
    thread = threading.Thread(
        target=lambda: asked.append(
            httpx.post(f"{here.url}/tokenize", json=body, timeout=PATIENCE_S)
        )
    )
    thread.start()
    until(lambda: len(waiting) == 1)
    here.loop.call_soon_threadsafe(here.service.gate.open)
    thread.join(PATIENCE_S)
    assert asked[0].json()["tokens"]
