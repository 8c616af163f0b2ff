"""One table from the errors of the house to the statuses and words of each dialect."""

import logging
import math
import re
from enum import Enum
from typing import Any

from litestar import Request, Response
from litestar.exceptions import HTTPException, SerializationException, ValidationException
from litestar.status_codes import HTTP_413_REQUEST_ENTITY_TOO_LARGE
from msgspec import Struct

from mlxstack.api.request_id import request_id
from mlxstack.core import errors

log = logging.getLogger("mlxstack.api")


class Dialect(Enum):
    """Whose envelope an error wears."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    LLAMA = "llama"


class ErrorFormat(Struct, frozen=True):
    """How one class of errors looks on the wire. `overload` is Anthropic's own status."""

    status: int
    openai: str
    code: str | None
    anthropic: str
    llama: str
    overload: int | None = None


INVALID = "invalid_request_error"

TABLE: dict[type[errors.StackError], ErrorFormat] = {
    errors.StackError: ErrorFormat(500, "server_error", None, "api_error", "server_error"),
    errors.BadRequest: ErrorFormat(400, INVALID, None, INVALID, INVALID),
    errors.TooLong: ErrorFormat(
        400, INVALID, "context_length_exceeded", INVALID, "exceed_context_size_error"
    ),
    errors.TooLarge: ErrorFormat(413, INVALID, None, "request_too_large", INVALID),
    errors.Unsupported: ErrorFormat(
        501, "not_supported_error", None, INVALID, "not_supported_error", overload=400
    ),
    errors.Unauthorized: ErrorFormat(
        401,
        "authentication_error",
        "invalid_api_key",
        "authentication_error",
        "authentication_error",
    ),
    errors.Forbidden: ErrorFormat(
        403, "permission_error", None, "permission_error", "permission_error"
    ),
    errors.NotFound: ErrorFormat(404, INVALID, None, "not_found_error", "not_found_error"),
    errors.UnknownModel: ErrorFormat(
        404, INVALID, "model_not_found", "not_found_error", "not_found_error"
    ),
    errors.Conflict: ErrorFormat(409, INVALID, "conflict", INVALID, INVALID),
    errors.SlotTaken: ErrorFormat(409, INVALID, "conflict", INVALID, INVALID),
    errors.Busy: ErrorFormat(
        503, "server_error", "overloaded", "overloaded_error", "unavailable_error", overload=529
    ),
    errors.OutOfMemory: ErrorFormat(
        503, "server_error", "overloaded", "overloaded_error", "unavailable_error", overload=529
    ),
    errors.Loading: ErrorFormat(503, "server_error", None, "api_error", "unavailable_error"),
    errors.Broken: ErrorFormat(500, "server_error", None, "api_error", "server_error"),
    errors.DiskFull: ErrorFormat(
        507, "server_error", "insufficient_storage", "api_error", "insufficient_storage_error"
    ),
    errors.Damaged: ErrorFormat(400, INVALID, None, INVALID, INVALID),
    errors.UnknownVersion: ErrorFormat(400, INVALID, None, INVALID, INVALID),
    errors.Unreadable: ErrorFormat(400, INVALID, None, INVALID, INVALID),
    errors.SetupError: ErrorFormat(500, "server_error", None, "api_error", "server_error"),
}

# Waiting can help with Busy and Loading; everything else above 499 will fail again.
LOADING_RETRY_S = 2

TOO_LARGE = "the body is larger than server.max_body_bytes allows"

# Litestar's name for the whole body, and msgspec's for a missing field.
BODY = "data"
MISSING = re.compile(r"Object missing required field `(.+)`")

OPENAI_ALIASES = ("/chat/completions", "/responses", "/models")


def row(error: errors.StackError) -> ErrorFormat:
    """The row of the error's class, or of its nearest ancestor."""
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)


def dialect(path: str) -> Dialect:
    """Who speaks on this path."""
    if path.startswith(("/v1/messages", "/v1/batch/messages")):
        return Dialect.ANTHROPIC
    if path.startswith("/v1/") or path.startswith(OPENAI_ALIASES):
        return Dialect.OPENAI
    return Dialect.LLAMA


def status(error: errors.StackError, of: Dialect) -> int:
    """The HTTP status in that dialect."""
    found = row(error)
    return (found.overload if of is Dialect.ANTHROPIC else None) or found.status


def body(error: errors.StackError, of: Dialect, request: str) -> dict[str, Any]:
    """The envelope, for a response as for an error inside a stream."""
    match of:
        case Dialect.ANTHROPIC:
            inner = {"type": row(error).anthropic, "message": _words(error, of)}
            return {"type": "error", "error": inner, "request_id": request}
        case Dialect.OPENAI:
            return {"error": _openai(error)}
        case Dialect.LLAMA:
            return {"error": _llama(error)}


def headers(error: errors.StackError) -> dict[str, str]:
    """When, and whether, to come again."""
    if isinstance(error, errors.Busy):
        return {"retry-after": str(max(1, math.ceil(error.retry_after)))}
    if isinstance(error, errors.Loading):
        return {"retry-after": str(LOADING_RETRY_S)}
    return {"x-should-retry": "false"} if row(error).status >= 500 else {}


def to_stack_error(problem: Exception) -> errors.StackError:
    """What a framework's or a foreign exception means in our words."""
    match problem:
        case errors.StackError():
            return problem
        case ValidationException():
            return _validation(problem)
        case SerializationException():
            return errors.BadRequest(f"the body is not valid JSON: {problem}")
        case HTTPException():
            return _http(problem)
        case RecursionError():
            return errors.BadRequest("the body is nested deeper than can be read here")
    log.error("unexpected failure", exc_info=problem)
    return errors.Broken(
        f"an unexpected {type(problem).__name__} inside the service; its log has the details"
    )


def exception_handler(
    request: Request[Any, Any, Any], problem: Exception
) -> Response[dict[str, Any]]:
    """The exception handler of every route: the envelope is chosen by the path."""
    error, of = to_stack_error(problem), dialect(request.scope["path"])
    return Response(
        body(error, of, request_id(request.scope)),
        status_code=status(error, of),
        headers=headers(error),
        media_type="application/json",
    )


def _openai(error: errors.StackError) -> dict[str, Any]:
    return {
        "message": _words(error, Dialect.OPENAI),
        "type": row(error).openai,
        "param": getattr(error, "param", None),
        "code": row(error).code,
        **_sizes(error),
    }


def _llama(error: errors.StackError) -> dict[str, Any]:
    return {
        "code": row(error).status,
        "message": _words(error, Dialect.LLAMA),
        "type": row(error).llama,
        **_sizes(error),
    }


def _sizes(error: errors.StackError) -> dict[str, int]:
    if isinstance(error, errors.TooLong):
        return {"n_prompt_tokens": error.got, "n_ctx": error.limit}
    return {}


def _words(error: errors.StackError, of: Dialect) -> str:
    """Clients look for these very words when a prompt is too long."""
    if not isinstance(error, errors.TooLong):
        return error.message
    match of:
        case Dialect.ANTHROPIC:
            return f"prompt is too long: {error.got} tokens > {error.limit} maximum"
        case Dialect.OPENAI:
            return (
                f"This model's maximum context length is {error.limit} tokens. "
                f"However, your messages resulted in {error.got} tokens."
            )
        case Dialect.LLAMA:
            return (
                f"request ({error.got} tokens) exceeds the available context size "
                f"({error.limit} tokens), try increasing it"
            )


def _validation(problem: ValidationException) -> errors.BadRequest:
    """Litestar lists what is wrong with which field; the first one is enough."""
    faults = problem.extra if isinstance(problem.extra, list) else []
    if not faults or not isinstance(faults[0], dict):
        return errors.BadRequest(problem.detail)
    message, key = str(faults[0].get("message", "")), str(faults[0].get("key", ""))
    if message == repr(BODY):
        return errors.BadRequest("the body is empty; a JSON object is needed")
    path = "" if key == BODY else key
    if missing := MISSING.match(message):
        path = f"{path}.{missing[1]}".strip(".")
        message = "Field required"
    return errors.BadRequest(f"{path}: {message}" if path else message, path or None)


def _http(problem: HTTPException) -> errors.StackError:
    match problem.status_code:
        case 401:
            return errors.Unauthorized(problem.detail)
        case 403:
            return errors.Forbidden(problem.detail)
        case 404 | 405:
            return errors.NotFound("File Not Found")
        case code if code == HTTP_413_REQUEST_ENTITY_TOO_LARGE:
            return errors.TooLarge(TOO_LARGE)
        case code if code < 500:
            return errors.BadRequest(problem.detail)
    log.error("unexpected failure", exc_info=problem)
    return errors.Broken(problem.detail)
