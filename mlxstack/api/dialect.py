"""API dialect: the protocol facts that all routes of one API share."""

from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct

from mlxstack.api.errors import STATUSES, nearest
from mlxstack.api.streaming import EVENT_STREAM, JSON_LINES, framed
from mlxstack.core.errors import StackError

ErrorBody = Callable[[StackError, str], dict[str, Any]]


class Dialect(Struct, frozen=True, kw_only=True):
    """One API: its routes, and how its clients expect errors, heartbeats and keys.

    A request belongs to the dialect with the longest of the `prefixes` of its path. `statuses`
    are those that differ from `STATUSES`. `heartbeat` keeps a stream open before its first event;
    an error after the head is a JSON line, or an SSE event, named `error_event` or nameless. On
    `streaming_paths` a body asks for a stream unless it says otherwise. Of two keys the one in
    `x-api-key` counts where the dialect prefers it.
    """

    routes: tuple[Any, ...] = ()
    prefixes: tuple[str, ...] = ()
    error_body: ErrorBody
    heartbeat: bytes
    error_event: str | None = None
    stream_type: str = EVENT_STREAM
    streaming_paths: frozenset[str] = frozenset()
    statuses: Mapping[type[StackError], int] = {}
    prefers_x_api_key: bool = False

    def status(self, error: StackError) -> int:
        """HTTP status of an error."""
        return nearest({**STATUSES, **self.statuses}, error)

    def error_frame(self, body: bytes) -> bytes:
        """Last frame of a stream, from the JSON of an error body."""
        return body + b"\n" if self.stream_type == JSON_LINES else framed(body, self.error_event)
