"""HTTP statuses of errors, and translation of foreign exceptions."""

import logging
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from litestar.exceptions import (
    HTTPException,
    MethodNotAllowedException,
    NotFoundException,
    SerializationException,
    ValidationException,
)
from litestar.status_codes import HTTP_413_REQUEST_ENTITY_TOO_LARGE

from mlxstack.core import errors

log = logging.getLogger("mlxstack.api")

INVALID = "invalid_request_error"
AUTHENTICATION = "authentication_error"
PERMISSION = "permission_error"


class ErrorRow(NamedTuple):
    """HTTP status of an error, and its types by dialect."""

    status: int
    openai: str = "server_error"
    code: str | None = None
    anthropic: str = "api_error"
    llama: str = "server_error"


_REFUSED = ErrorRow(400, INVALID, None, INVALID, INVALID)
_MISSING = ErrorRow(404, INVALID, None, "not_found_error", "not_found_error")

ERRORS: Mapping[type[errors.StackError], ErrorRow] = {
    errors.StackError: ErrorRow(500),
    errors.BadRequest: _REFUSED,
    errors.TooLong: _REFUSED._replace(
        code="context_length_exceeded", llama="exceed_context_size_error"
    ),
    errors.TooLarge: _REFUSED._replace(status=413, anthropic="request_too_large"),
    errors.UnknownCoding: _REFUSED._replace(status=415),
    errors.UpgradeRefused: _REFUSED._replace(status=426),
    errors.UnknownResponse: _REFUSED._replace(code="previous_response_not_found"),
    errors.Unsupported: ErrorRow(501, "not_supported_error", None, INVALID, "not_supported_error"),
    errors.Unauthorized: ErrorRow(
        401, AUTHENTICATION, "invalid_api_key", AUTHENTICATION, AUTHENTICATION
    ),
    errors.Forbidden: ErrorRow(403, PERMISSION, None, PERMISSION, PERMISSION),
    errors.NotFound: _MISSING,
    errors.WrongMethod: _MISSING._replace(status=405),
    errors.UnknownModel: _MISSING._replace(code="model_not_found"),
    errors.Conflict: _REFUSED._replace(status=409, code="conflict"),
    errors.Busy: ErrorRow(
        503, "server_error", "overloaded", "overloaded_error", "unavailable_error"
    ),
    errors.Loading: ErrorRow(503, llama="unavailable_error"),
    errors.DiskFull: ErrorRow(507, code="insufficient_storage", llama="insufficient_storage_error"),
    errors.Damaged: _REFUSED,
}

# A retry can help with Busy and Loading; everything else above 499 will fail again.
LOADING_RETRY_S = 2

TOO_LARGE = "the body is larger than server.max_body_bytes allows"

# msgspec's words for JSON that ends too early.
TRUNCATED = "Input data was truncated"
MALFORMED = "JSON is malformed"

# Litestar's name for the whole body, and msgspec's for a missing field.
BODY = "data"
MISSING = re.compile(r"Object missing required field `(.+)`")

# Paths of the bodies that are sent to a wrong one, by the field that is missing there.
ELSEWHERE = {
    **dict.fromkeys(("input", "prompt"), "; one with messages belongs to /v1/chat/completions"),
    "messages": "; one with input belongs to /v1/responses, with prompt to /v1/completions",
}


def row_of(error: errors.StackError) -> ErrorRow:
    """Row of the error's class, or of its nearest ancestor."""
    return next(ERRORS[cls] for cls in type(error).__mro__ if cls in ERRORS)


def context_sizes(error: errors.StackError) -> dict[str, int]:
    """Token counts that llama-server adds to a too-long prompt's error."""
    if isinstance(error, errors.TooLong):
        return {"n_prompt_tokens": error.got, "n_ctx": error.limit}
    return {}


def details(error: errors.StackError) -> dict[str, Any]:
    """Published code of an error, by which Anthropic's SDKs go on."""
    if isinstance(error, errors.NoThreads):
        code = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        return {"details": code}
    return {}


def headers(error: errors.StackError) -> dict[str, str]:
    """Headers for a retry: when, whether, and in which other form."""
    match error:
        case errors.Busy():
            return {"retry-after": str(max(1, math.ceil(error.retry_after)))}
        case errors.Loading():
            return {"retry-after": str(LOADING_RETRY_S)}
        case errors.WrongMethod():
            return {"allow": error.allowed}
        case errors.UnknownCoding():
            return {"accept-encoding": error.known}
        case errors.UpgradeRefused():
            return {"upgrade": "HTTP/1.1", "connection": "upgrade, close"}
    is_final = row_of(error).status >= 500
    return {"x-should-retry": "false"} if is_final else {}


def to_stack_error(
    problem: Exception, method: str = "", path: str = "", n_body: int = 0
) -> errors.StackError:
    """Translate an exception of a framework or library into a StackError.

    A route that does not exist is named by the `method` and `path` of the request, the end of
    incomplete JSON by the `n_body` bytes of its body.
    """
    match problem:
        case errors.StackError():
            return problem
        case ValidationException():
            return _validation(problem)
        case NotFoundException() | MethodNotAllowedException():
            return _no_route(problem, method, path)
        case HTTPException():
            return _http(problem, n_body)
        case SerializationException() | UnicodeDecodeError() | RecursionError():
            return errors.BadRequest(_unreadable(problem, n_body))
    log.error("unexpected failure", exc_info=problem)
    return errors.Broken(
        f"an unexpected {type(problem).__name__} inside the service; its log has the details"
    )


def _unreadable(problem: Exception, n_body: int) -> str:
    """Why a body cannot be read."""
    match problem:
        case UnicodeDecodeError():
            where = f"{problem.reason} at byte {problem.start}"
            return f"the body is not UTF-8 text ({where}); send JSON in UTF-8"
        case RecursionError():
            return "the body is nested deeper than can be read here"
    return _bad_json(str(problem), n_body)


def _bad_json(detail: str, n_body: int) -> str:
    if TRUNCATED in detail:
        return f"the body is not JSON: it ends at byte {n_body}, before the JSON does"
    return f"the body is not JSON: {detail}"


def _no_route(problem: HTTPException, method: str, path: str) -> errors.NotFound:
    """Error of a request without a route, which begins as llama-server's."""
    allow = (problem.headers or {}).get("allow", "")
    if allowed := sorted({*allow.split(", ")} - {"", "HEAD", "OPTIONS"}):
        return errors.WrongMethod(f"{path} takes {' or '.join(allowed)}, not {method}", allow)
    if path.startswith("/v1/v1/"):
        reason = f"there is no {path}; leave one /v1 out of the client's base URL"
    else:
        reason = f"there is no {method} {path}; {served_instead(path)}"
    return errors.NotFound(f"File Not Found: {reason}")


def served_instead(path: str) -> str:
    """Hint at the paths in place of a missing one."""
    if path.startswith("/api/v1/"):
        return (
            "of LM Studio's /api/v1 only GET /api/v1/models is served; send conversations to "
            "/v1/chat/completions, /v1/responses or /v1/messages"
        )
    return "/schema/openapi.json lists what there is"


def _validation(problem: ValidationException) -> errors.BadRequest:
    """First of the invalid fields that Litestar lists."""
    faults = problem.extra if isinstance(problem.extra, list) else []
    if not faults or not isinstance(faults[0], dict):
        return errors.BadRequest(problem.detail)
    message = str(faults[0].get("message", ""))
    key = str(faults[0].get("key", ""))
    if message == repr(BODY):
        return errors.BadRequest("the body is empty; a JSON object is needed")
    path = "" if key == BODY else key
    if missing := MISSING.match(message):
        path = f"{path}.{missing[1]}".strip(".")
        message = f"Field required{ELSEWHERE.get(path, '')}"
    return errors.BadRequest(f"{path}: {message}" if path else message, path or None)


def _http(problem: HTTPException, n_body: int) -> errors.StackError:
    match problem.status_code:
        case code if code == HTTP_413_REQUEST_ENTITY_TOO_LARGE:
            return errors.TooLarge(TOO_LARGE)
        case code if code < 500:
            is_json = problem.detail.startswith((TRUNCATED, MALFORMED))
            return errors.BadRequest(
                _bad_json(problem.detail, n_body) if is_json else problem.detail
            )
    log.error("unexpected failure", exc_info=problem)
    return errors.Broken(problem.detail)
