"""While the model is changed, few wait, with bodies that are no longer than any other."""

import asyncio
import socket
from collections.abc import Iterator

import httpx
import pytest
from msgspec import structs

from mlxstack.api import swap_middleware
from mlxstack.core.preset import QueueSpec, ServerSpec
from tests.api.running import Running, serving, standing
from tests.patience import PATIENCE_S, until
from tests.service.standin import FACTS

pytestmark = pytest.mark.net

CHAT = "/v1/chat/completions"
KEY = {"x-api-key": "key"}
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A service whose gate is closed, with room for two, who look at the gate often."""
    monkeypatch.setattr(swap_middleware, "FIRST_S", 0.01)
    spec = ServerSpec(port=0, max_body_bytes=200_000, api_keys=("key",))
    service, engine = standing(spec)
    service.preset = structs.replace(service.preset, queue=QueueSpec(max_waiting=2))
    engine.loading.set_result(FACTS)
    with socket.create_server(("127.0.0.1", 0)) as listener, serving(service, listener) as found:
        found.loop.call_soon_threadsafe(service.gate.close)
        yield found


def test_a_body_over_the_limit_is_refused_before_the_gate(closed: Running) -> None:
    answer = httpx.post(closed.url + CHAT, json={**HELLO, "filler": "x" * 200_000}, headers=KEY)
    assert answer.status_code == 413
    assert answer.json()["error"]["message"].endswith("server.max_body_bytes allows")
    assert answer.headers["x-request-id"].startswith("req_")


async def test_e18_the_waiting_room_has_as_many_seats_as_the_queue(closed: Running) -> None:
    async with httpx.AsyncClient(base_url=closed.url, timeout=PATIENCE_S, headers=KEY) as http:
        seated = [asyncio.create_task(http.post(CHAT, json=HELLO)) for _ in range(2)]
        await until(lambda: len(closed.service.gate._requests) == 2)
        for path, status in ((CHAT, 503), ("/v1/messages", 529)):
            refused = await http.post(path, json={**HELLO, "max_tokens": 1})
            assert refused.status_code == status
            assert refused.headers["retry-after"] == "1"
            assert "no more are queued" in refused.json()["error"]["message"]
        closed.loop.call_soon_threadsafe(closed.service.gate.open)
        assert [answer.status_code for answer in await asyncio.gather(*seated)] == [200, 200]


async def test_a_body_nested_too_deep_is_refused_after_the_wait(closed: Running) -> None:
    async with httpx.AsyncClient(base_url=closed.url, timeout=PATIENCE_S, headers=KEY) as http:
        waits = asyncio.create_task(http.post(CHAT, content=b"[" * 100_000))
        await until(lambda: len(closed.service.gate._requests) == 1)
        assert not waits.done()
        closed.loop.call_soon_threadsafe(closed.service.gate.open)
        answer = await waits
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_thread_is_refused_before_the_wait(closed: Running, stream: bool) -> None:
    """Behind an early head its code would come with status 200, which ends the client's loop."""
    thread = {"thread": {"type": "create"}, "stream": stream, "max_tokens": 1}
    async with httpx.AsyncClient(base_url=closed.url, timeout=PATIENCE_S, headers=KEY) as http:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            answer = await http.post(path, json={**HELLO, **thread})
            assert answer.status_code == 400
            assert answer.json()["error"]["details"]["error_code"] == "thread_unsupported_request"
        # Other dialects ignore the field.
        waits = asyncio.create_task(http.post(CHAT, json={**HELLO, **thread}))
        await until(lambda: len(closed.service.gate._requests) == 1)
        closed.loop.call_soon_threadsafe(closed.service.gate.open)
        assert (await waits).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"x-api-key": "guessed"}, 401),
        ({**KEY, "host": "evil.com"}, 403),
        ({**KEY, "origin": "http://evil.com"}, 403),
        ({**KEY, "host": "::1%/evil"}, 403),
        ({**KEY, "origin": "http://[evil"}, 403),
    ],
)
def test_strangers_do_not_wait(closed: Running, headers: dict[str, str], status: int) -> None:
    answer = httpx.post(closed.url + CHAT, json=HELLO, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
