"""The calls of one service, and its event feed with reconnection."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from httpx_sse import EventSource

from mlxstack.client.errors import Unreachable, decode, error_of, message_of
from mlxstack.client.types import (
    ChatResponse,
    FeedLost,
    HealthResponse,
    PropsResponse,
    ServerSentEvent,
    SlotResponse,
)
from mlxstack.core.errors import Broken, StackError, Unauthorized

T = TypeVar("T")

FIRST_RECONNECT_S = 0.05
MAX_RECONNECT_S = 5.0


class Client:
    """HTTP client of one service.

    `url` is like `http://127.0.0.1:7109`; `timeout_s` bounds the silence of any response; `member`
    is the member of a gateway that all requests are for. Methods raise Unreachable when nothing
    answers there, and otherwise the service's own error (a StackError of the kind that its status
    stands for).
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        member: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._model = "" if member is None else f"model={quote(member, safe='')}"
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, 5.0))
        # Without TLS no certificates are needed; to read them takes longer than a request.
        is_plain = self.url.lower().startswith("http:")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=timeout,
            trust_env=False,
            # Those of SSL_CERT_FILE or SSL_CERT_DIR, where one is set.
            verify=False if is_plain else httpx.create_ssl_context(),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def health(self) -> HealthResponse:
        """GET /health; a service that is not ready does not raise."""
        answer = await self._send("GET", "/health")
        if answer.is_success:
            return HealthResponse(True, "ok")
        return HealthResponse(False, message_of(answer.content) or f"HTTP {answer.status_code}")

    async def props(self) -> PropsResponse:
        """GET /props, typed."""
        return await self.get("/props", PropsResponse)

    async def slots(self) -> list[SlotResponse]:
        """GET /slots."""
        return await self.get("/slots", list[SlotResponse])

    async def metrics(self) -> str:
        """GET /metrics, the Prometheus text."""
        return (await self._checked("GET", "/metrics")).text

    async def get(self, path: str, kind: type[T]) -> T:
        """Any JSON resource, decoded as `kind`."""
        return decode((await self._checked("GET", path)).content, kind)

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST of a JSON body; the JSON object of the response."""
        return decode((await self._checked("POST", path, body)).content, dict[str, Any])

    async def delete(self, path: str) -> dict[str, Any]:
        """Any DELETE with a JSON object as its answer."""
        return decode((await self._checked("DELETE", path)).content, dict[str, Any])

    def chat_stream(
        self, messages: list[dict[str, Any]], **body: Any
    ) -> AsyncGenerator[ChatResponse, None]:
        """Stream the chunks of a generation; leaving the iteration cancels it."""
        return self._chunks("/v1/chat/completions", {"messages": messages, **body})

    def text_stream(self, prompt: str, **body: Any) -> AsyncGenerator[ChatResponse, None]:
        """Stream the continuation of a text, as `chat_stream` does."""
        return self._chunks("/v1/completions", {"prompt": prompt, **body})

    async def _chunks(self, path: str, body: dict[str, Any]) -> AsyncGenerator[ChatResponse, None]:
        asked = {"stream": True, "stream_options": {"include_usage": True}, **body}
        async with (
            self._stream("POST", path, asked) as answer,
            contextlib.aclosing(_events(answer)) as stream,
        ):
            async for event in stream:
                if event.data == b"[DONE]":
                    return
                failed = message_of(event.data)
                if failed is not None:
                    raise Broken(failed)
                yield decode(event.data, ChatResponse)

    async def feed(
        self, path: str, silence_s: float = 30.0
    ) -> AsyncGenerator[ServerSentEvent | FeedLost, None]:
        """Server-sent events for ever, with a FeedLost at each break.

        `silence_s` is the longest silence of a healthy feed, comments included.
        """
        delay = FIRST_RECONNECT_S
        while True:
            reason = "the service ended the feed"
            needs_key = False
            try:
                async with (
                    self._stream("GET", path, timeout_s=silence_s) as answer,
                    contextlib.aclosing(_events(answer)) as stream,
                ):
                    async for event in stream:
                        delay = FIRST_RECONNECT_S
                        yield event
            except (Unreachable, StackError) as error:
                reason = str(error)
                needs_key = isinstance(error, Unauthorized)
            yield FeedLost(reason, delay, needs_key)
            await asyncio.sleep(delay)
            delay = min(delay * 2, MAX_RECONNECT_S)

    async def _checked(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        answer = await self._send(method, path, body)
        if not answer.is_success:
            raise error_of(answer)
        return answer

    async def _send(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> httpx.Response:
        try:
            return await self._http.request(method, self._for_member(path), json=body)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    @contextlib.asynccontextmanager
    async def _stream(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[httpx.Response]:
        timeout = self._http.timeout
        if timeout_s is not None:
            timeout = httpx.Timeout(timeout_s)
        try:
            path = self._for_member(path)
            async with self._http.stream(method, path, json=body, timeout=timeout) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise error_of(answer)
                yield answer
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def _for_member(self, path: str) -> str:
        if self._model:
            return f"{path}{'&' if '?' in path else '?'}{self._model}"
        return path

    def _unreachable(self, error: httpx.TransportError) -> Unreachable:
        return Unreachable(f"no answer from {self.url} ({str(error) or type(error).__name__})")


async def _events(answer: httpx.Response) -> AsyncGenerator[ServerSentEvent, None]:
    """Events of a stream, without comments (heartbeats)."""
    async with contextlib.aclosing(EventSource(answer).aiter_sse()) as stream:
        async for event in stream:
            if event.data:
                yield ServerSentEvent(event.event, event.data.encode())
