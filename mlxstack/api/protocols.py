"""API dialects: paths, error bodies, heartbeats, keys. No routes, and no service."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from litestar import Response
from msgspec import Struct, structs

from mlxstack.api.error_bodies import (
    ANTHROPIC_HEARTBEAT,
    OLLAMA_HEARTBEAT,
    anthropic_error,
    bare_chat_error,
    llama_error,
    ollama_error,
    openai_error,
    responses_frame,
)
from mlxstack.api.errors import headers, row_of
from mlxstack.api.streaming import BLANK, EVENT_STREAM, JSON_LINES, KEEPALIVE, framed
from mlxstack.core.errors import Busy, OutOfMemory, StackError, Unsupported

ErrorBody = Callable[[StackError, str], dict[str, Any]]


class Dialect(Struct, frozen=True, kw_only=True):
    """API dialect: its routes, and its errors, heartbeats and keys."""

    routes: tuple[Any, ...] = ()
    prefixes: tuple[str, ...] = ()
    """Of paths; a request belongs to the dialect with the longest one of its path."""
    error_body: ErrorBody
    heartbeat: bytes
    """Keeps a stream open before its first event."""
    error_frame: Callable[[bytes], bytes] = framed
    """Makes the last frame of a stream from the JSON of an error body."""
    stream_type: str = EVENT_STREAM
    streaming_paths: frozenset[str] = frozenset()
    """Paths whose bodies ask for a stream unless they say otherwise."""
    statuses: Mapping[type[StackError], int] = {}
    """Those that differ from `ERRORS`."""
    prefers_x_api_key: bool = False
    """Of two keys the one in `x-api-key` counts."""

    def status(self, error: StackError) -> int:
        """HTTP status of an error."""
        return self.statuses.get(type(error), row_of(error).status)

    def error_response(self, error: StackError, request_id: str) -> Response[Any]:
        """Response to a request that failed."""
        return Response(
            self.error_body(error, request_id),
            status_code=self.status(error),
            headers=headers(error),
            media_type="application/json",
        )

    def heartbeat_of(self, media_type: str) -> bytes:
        """Heartbeat of a response of this type, else b""."""
        if media_type.startswith(self.stream_type):
            return self.heartbeat
        if media_type.startswith("application/json"):
            return BLANK
        return b""


OPENAI = Dialect(
    prefixes=("/v1/", "/models", "/api/v0/", "/api/v1/"),
    error_body=openai_error,
    heartbeat=KEEPALIVE,
)
# Only llama-server has the path without its version, and its clients know its type of an error.
BARE_CHAT = structs.replace(OPENAI, prefixes=("/chat/completions",), error_body=bare_chat_error)
RESPONSES = structs.replace(
    OPENAI,
    prefixes=("/v1/responses", "/responses", "/v1/batch/responses"),
    error_frame=responses_frame,
)
ANTHROPIC = Dialect(
    prefixes=("/v1/messages", "/v1/batch/messages"),
    error_body=anthropic_error,
    heartbeat=ANTHROPIC_HEARTBEAT,
    error_frame=partial(framed, event="error"),
    statuses={Unsupported: 400, Busy: 529, OutOfMemory: 529},
    prefers_x_api_key=True,
)
LLAMA_SERVER = Dialect(prefixes=("",), error_body=llama_error, heartbeat=KEEPALIVE)
OLLAMA = Dialect(
    prefixes=("/api/",),
    error_body=ollama_error,
    heartbeat=OLLAMA_HEARTBEAT,
    stream_type=JSON_LINES,
    error_frame=lambda body: body + b"\n",
    streaming_paths=frozenset({"/api/chat", "/api/generate", "/api/pull"}),
)

PROTOCOLS = (OPENAI, BARE_CHAT, RESPONSES, ANTHROPIC, LLAMA_SERVER, OLLAMA)


def dialect_of(path: str, dialects: Iterable[Dialect] = PROTOCOLS) -> Dialect:
    """Dialect of a request by the longest prefix of its path."""
    prefixes = {prefix: dialect for dialect in dialects for prefix in dialect.prefixes}
    return prefixes[max(filter(path.startswith, prefixes), key=len)]
