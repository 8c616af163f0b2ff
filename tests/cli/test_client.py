"""The client against a real socket: typed answers, errors by status, streams, the feed."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from mlxstack.client.client import Client
from mlxstack.client.errors import Unreachable
from mlxstack.client.types import ChatResponse, FeedLost, ServerSentEvent
from mlxstack.core.errors import (
    BadRequest,
    Broken,
    Busy,
    Loading,
    NotFound,
    StackError,
    Unauthorized,
)
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.net

Answer = Callable[[str, bytes, asyncio.StreamWriter], Awaitable[None]]


class Door:
    """A one-connection-per-call HTTP server that answers as the test says."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.headers: list[str] = []
        self.url = ""
        self.is_left = asyncio.Event()

    async def open(self, port: int = 0) -> asyncio.Server:
        server = await asyncio.start_server(self._call, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def _call(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.headers.append(head)
            fields = dict(line.split(": ", 1) for line in head.lower().split("\r\n")[1:] if line)
            body = await reader.readexactly(int(fields.get("content-length", 0)))
            await self.answer(head.split(" ")[1], body, writer)
        except ConnectionError:
            pass
        finally:
            self.is_left.set()
            writer.close()


def plain(status: int, body: object) -> bytes:
    content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
    return head.encode() + content


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


async def served(answer: Answer) -> AsyncIterator[Door]:
    door = Door(answer)
    server = await door.open()
    async with server:
        yield door


def always(content: bytes) -> Answer:
    async def answer(_target: str, _body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(content)
        await writer.drain()

    return answer


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, {"error": {"message": "no"}}, BadRequest),
        (401, {"error": {"message": "no"}}, Unauthorized),
        (404, {"error": {"message": "no"}}, NotFound),
        (503, {"error": {"message": "no"}}, Busy),
        (503, {"error": {"message": "Loading model"}}, Loading),
        (529, {"type": "error", "error": {"message": "no"}}, Busy),
        (500, {"error": {"message": "no"}}, Broken),
        (502, "<html>proxy</html>", Broken),
        (400, [1], BadRequest),
    ],
)
async def test_errors_are_told_by_status(status: int, body: object, kind: type[StackError]) -> None:
    async for door in served(always(plain(status, body))):
        async with Client(door.url) as client:
            with pytest.raises(kind) as caught:
                await client.slots()
            assert type(caught.value) is kind
            assert caught.value.message


async def test_health_does_not_raise_for_a_service_that_says_no() -> None:
    async for door in served(always(plain(503, {"error": {"message": "Loading model"}}))):
        async with Client(door.url) as client:
            health = await client.health()
            assert (health.is_ready, health.message) == (False, "Loading model")


async def test_nobody_there_is_unreachable() -> None:
    async for door in served(always(b"")):
        url = door.url
    async with Client(url) as client:
        with pytest.raises(Unreachable, match=url):
            await client.health()


async def test_slots_and_props_decode_and_ignore_what_they_do_not_know() -> None:
    async def answer(target: str, _body: bytes, writer: asyncio.StreamWriter) -> None:
        if target == "/props":
            settings = {"n_ctx": 64, "params": {"seed": 1}}
            body: object = {"total_slots": 2, "default_generation_settings": settings, "new": 1}
        else:
            used = {"agent": "a", "next_token": [{"n_decoded": 5, "n_remain": 7, "x": 0}]}
            slot = {"id": 0, "n_ctx": 64, "is_processing": True, "speculative": False, **used}
            body = [slot, {"id": 1, "n_ctx": 64, "is_processing": False}]
        writer.write(plain(200, body))

    async for door in served(answer):
        async with Client(door.url, api_key="k1") as client:
            props = await client.props()
            assert (props.total_slots, props.default_generation_settings.n_ctx) == (2, 64)
            first, second = await client.slots()
            assert (first.agent, first.next_token[0].n_decoded) == ("a", 5)
            assert (second.agent, second.next_token) == (None, ())
        assert all("authorization: Bearer k1" in head for head in door.headers)


async def test_a_post_sends_a_body_and_returns_an_object() -> None:
    calls = []

    async def answer(target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        calls.append((target, json.loads(body)))
        sizes = {"n_saved": 3, "n_written": 9, "n_restored": 3, "n_read": 9, "n_erased": 3}
        writer.write(plain(200, {"id_slot": 1, "filename": "f", "timings": {}, **sizes}))

    async for door in served(answer):
        async with Client(door.url) as client:
            for action, body in (("save", {"filename": "f"}), ("erase", {})):
                done = await client.post(f"/slots/1?action={action}", body)
                assert done["n_saved"] == done["n_erased"] == 3
    assert calls == [("/slots/1?action=save", {"filename": "f"}), ("/slots/1?action=erase", {})]


def chunk(text: str) -> bytes:
    body = {"id": "c", "choices": [{"index": 0, "delta": {"content": text}}]}
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


async def test_a_stream_is_told_chunk_by_chunk_with_any_text() -> None:
    usage = {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}
    last = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\r\n\r\n"
    texts = ["one ", "line\u2028separator", "\x85", "ünï"]
    wire = STREAM + b": keepalive 1/9\n\n" + b"".join(map(chunk, texts)) + last
    wire += b"data: [DONE]\n\n"

    async def answer(_target: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        assert json.loads(body)["stream"] is True
        for at in range(0, len(wire), 7):
            writer.write(wire[at : at + 7])
            await writer.drain()

    async for door in served(answer):
        async with Client(door.url) as client:
            got = [one async for one in client.chat_stream([], max_tokens=4)]
    said = [choice.delta.content for one in got for choice in one.choices]
    assert said == texts
    assert got[-1].usage is not None and got[-1].usage.cached_tokens == 8


async def test_an_error_inside_a_stream_is_raised() -> None:
    wire = STREAM + chunk("a") + b'data: {"error": {"message": "the engine failed"}}\n\n'
    async for door in served(always(wire)):
        async with Client(door.url) as client:
            got: list[ChatResponse] = []
            with pytest.raises(Broken, match="the engine failed"):
                async for one in client.chat_stream([]):
                    got.append(one)  # noqa: PERF401 - keeps what came before the error
            assert len(got) == 1


async def test_leaving_a_stream_closes_the_connection() -> None:
    async def answer(_target: str, _body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        while True:
            writer.write(chunk("more"))
            await writer.drain()
            await asyncio.sleep(0.01)

    async for door in served(answer):
        async with Client(door.url) as client:
            stream = client.chat_stream([])
            await anext(stream)
            await stream.aclose()
            await asyncio.wait_for(door.is_left.wait(), PATIENCE_S)


async def test_the_feed_comes_back_after_a_restart() -> None:
    async def answer(_target: str, _body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + b"event: frame\ndata: 1\ndata: 2\n\n")
        await writer.drain()

    door = Door(answer)
    server = await door.open()
    port = server.sockets[0].getsockname()[1]
    async with Client(door.url) as client:
        feed = client.feed("/events")
        assert await anext(feed) == ServerSentEvent("frame", b"1\n2")
        server.close()
        await server.wait_closed()
        ended = await anext(feed)
        assert isinstance(ended, FeedLost) and "ended the feed" in ended.reason
        refused = [await anext(feed), await anext(feed)]
        assert all(isinstance(one, FeedLost) and "no answer" in one.reason for one in refused)
        server = await door.open(port)
        async with server:
            while isinstance(one := await anext(feed), FeedLost):
                pass
            assert one == ServerSentEvent("frame", b"1\n2")
            after = await anext(feed)
            assert isinstance(after, FeedLost) and after.retry_s < 0.1
        await feed.aclose()


async def test_a_silent_feed_is_lost() -> None:
    async def answer(_target: str, _body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        await writer.drain()
        await asyncio.sleep(5)

    async for door in served(answer):
        async with Client(door.url) as client:
            feed = client.feed("/events", silence_s=0.1)
            lost = await anext(feed)
            assert isinstance(lost, FeedLost)
            await feed.aclose()


@pytest.mark.parametrize("url", ["https://other.example", "HTTPS://other.example"])
async def test_certificates_are_checked_wherever_there_is_tls(url: str) -> None:
    async with Client(url) as client:
        pool = client._http._transport._pool  # type: ignore[attr-defined]
        assert pool._ssl_context.verify_mode is ssl.CERT_REQUIRED
