"""Errors of a service, by HTTP status."""

from typing import Any, TypeVar

import httpx
import msgspec

from mlxstack.core.errors import (
    BadRequest,
    Broken,
    Busy,
    Conflict,
    DiskFull,
    Forbidden,
    Loading,
    NotFound,
    StackError,
    TooLarge,
    Unauthorized,
    Unsupported,
)

T = TypeVar("T")

KINDS: dict[int, type[StackError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    429: Busy,
    501: Unsupported,
    503: Busy,
    507: DiskFull,
    529: Busy,
}


class Unreachable(ConnectionError):
    """Nothing answers at this address."""


def error_of(answer: httpx.Response) -> StackError:
    """Error of an unsuccessful response; Broken where none is closer."""
    message = message_of(answer.content) or f"the service answered HTTP {answer.status_code}"
    if answer.status_code == 503 and message == "Loading model":
        return Loading("the model is still being loaded")
    return KINDS.get(answer.status_code, Broken)(message)


def message_of(content: bytes) -> str | None:
    """Message in an error body of any dialect, or None."""
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        return None
    error: Any = body.get("error") if isinstance(body, dict) else None
    message = None
    if isinstance(error, dict):
        message = error.get("message")
    if isinstance(message, str):
        return message
    return None


def decode(content: bytes, kind: type[T]) -> T:
    """Decode a body as `kind`. Raises Broken for an unexpected one."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise Broken(f"the service answered something unexpected: {error}") from error
