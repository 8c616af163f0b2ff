"""A dialect is its own files and one line of the registry."""

import socket
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from litestar import get
from litestar.response import Stream

from mlxstack.api import app, registry, streaming
from mlxstack.api.protocols import Dialect
from mlxstack.core.errors import Broken, Busy, NotFound, StackError
from mlxstack.core.preset import ServerSpec
from mlxstack.core.response_parts import ContentPart, ResponsePart
from tests.api.running import serving, standing
from tests.patience import PATIENCE_S
from tests.service.standin import FACTS

pytestmark = pytest.mark.net


def error_body(error: StackError, request: str) -> dict[str, Any]:
    return {"error": error.message, "request": request}


class LineRenderer(streaming.Renderer):
    """A frame per text; the defaults of the protocol for the rest."""

    def render(self, index: int, part: ResponsePart) -> Iterable[bytes]:
        assert isinstance(part, ContentPart)
        yield streaming.frame({"n": index, "text": part.text})

    def failure(self, error: StackError) -> bytes:
        return streaming.frame(error_body(error, ""), "broken")


async def parts() -> AsyncGenerator[tuple[int, ResponsePart], None]:
    yield 1, ContentPart("b")
    raise Broken("half way")


@get("/api/full", opt={"is_public": True})
async def full() -> None:
    raise Busy("come back later", 3)


@get("/api/lines", opt={"is_public": True})
async def lines() -> Stream:
    return streaming.streamed(streaming.frames(ContentPart("a"), parts(), LineRenderer()), {})


OTHER = Dialect(
    routes=(full, lines),
    prefixes=("/api/",),
    error_body=error_body,
    heartbeat=b"{}",
    statuses={Busy: 429},
)


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """A service that speaks one more dialect."""
    for module in (app, registry):
        monkeypatch.setattr(module, "DIALECTS", (*registry.DIALECTS, OTHER))
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        serving(service, listener) as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as client,
    ):
        yield client


def test_errors_of_a_new_dialect_have_its_status_and_envelope(http: httpx.Client) -> None:
    refused = http.get("/api/full")
    assert refused.status_code == 429 and refused.headers["retry-after"] == "3"
    request = refused.headers["x-request-id"]
    assert refused.json() == {"error": "come back later", "request": request}
    assert set(http.get("/api/nothing").json()) == {"error", "request"}
    assert set(http.get("/nothing").json()["error"]) == {"code", "message", "type"}


def test_a_renderer_of_a_new_dialect_streams_to_its_own_failure(http: httpx.Client) -> None:
    first, second, last, end = http.get("/api/lines").text.split("\n\n")
    assert [msgspec.json.decode(one.removeprefix("data: ")) for one in (first, second)] == [
        {"n": 0, "text": "a"},
        {"n": 1, "text": "b"},
    ]
    assert last.startswith("event: broken\ndata: ") and "half way" in last
    assert end == ""


def test_no_prefix_belongs_to_two_dialects() -> None:
    prefixes = [prefix for dialect in registry.DIALECTS for prefix in dialect.prefixes]
    assert len(prefixes) == len(set(prefixes))
    assert b"event: error" in registry.dialect_of("/v1/batch/responses").error_frame(
        b'{"error":{}}'
    )
    assert registry.dialect_of("/v1/messages").heartbeat.startswith(b"event: ping")
    assert registry.dialect_of("/v1/chat/completions").heartbeat.startswith(b": ")
    assert registry.dialect_of("/v1/messages").status(NotFound("no")) == 404
