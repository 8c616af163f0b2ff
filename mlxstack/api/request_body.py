"""Request bodies: read whole, decoded, bounded together, and their JSON mended.

Half of a surrogate pair stays in the history of a client that sent it, so that a refusal would end
its conversation for good.
"""

import asyncio
import codecs
import re
import sys
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from litestar import Request
from litestar.exceptions import SerializationException
from litestar.serialization import decode_json

from mlxstack.api import errors
from mlxstack.api.disconnect import ClientDisconnected
from mlxstack.core.errors import BadRequest, Busy, TooLarge, UnknownCoding
from mlxstack.host.heap import trim_heap

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

T = TypeVar("T")

RETRY_S = 2.0
TRIMMED_BYTES = 32 * 1024 * 1024
"""Bytes of finished bodies after which freed memory is returned to the system."""


MAX_PARTS = 1000
"""Members or frames of one compressed body; each costs a copy of what follows it."""

_HIGH = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# An escape begins after an even number of backslashes; only halves without the other are replaced.
_ESCAPES = re.compile(
    rb"(?<!\\)((?:\\\\)*)(?:(%b%b)|%b|%b)|\xed[\xa0-\xbf][\x80-\xbf]" % (_HIGH, _LOW, _HIGH, _LOW)
)
# UTF-16's mark begins that of UTF-32.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_REPLACEMENT = "\ufffd"


MAX_CODINGS = 2


class BodyBudget:
    """Bytes that the bodies of all requests in flight hold together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.n_bytes = 0
        self._n_finished = 0

    def take(self, n_bytes: int) -> None:
        """Count bytes of a body. Raises Busy where they do not fit."""
        if self.n_bytes + n_bytes > self._max_bytes:
            raise Busy(
                "the bodies of the requests in flight fill server.max_bodies_bytes; "
                "send the request again later",
                RETRY_S,
            )
        self.n_bytes += n_bytes

    def give_back(self, n_bytes: int) -> None:
        """Free bytes, and memory after many of them.

        Requests that are refused leave cycles with their bodies, few objects of many bytes, and
        the collector counts objects.
        """
        self.n_bytes -= n_bytes
        self._n_finished += n_bytes
        if self._n_finished > TRIMMED_BYTES:
            self._n_finished = 0
            asyncio.get_running_loop().run_in_executor(None, trim_heap)


class RequestBody:
    """Body of one request, holding budget until it is closed."""

    def __init__(self, scope: Any, receive: Any, max_bytes: int, budget: BodyBudget) -> None:
        self.connection_receive = receive
        """`receive` of the connection, for what follows the body."""
        self._scope = scope
        self._max_bytes = max_bytes
        self._budget = budget
        self._n_taken = 0
        self._data: bytes | None = None
        self._is_replayed = False

    async def read(self) -> bytes:
        """The whole body, decoded.

        Raises TooLarge, Busy, UnknownCoding, BadRequest for one that cannot be decoded, and
        ClientDisconnected.
        """
        if self._data is None:
            decoders = decoders_of(_header(self._scope, b"content-encoding"))
            self._data = await self._read(decoders)
            self._scope.setdefault("state", {})["n_body"] = len(self._data)
        return self._data

    async def receive(self) -> dict[str, Any]:
        """The whole body as one message, then what the connection sends."""
        if self._is_replayed:
            message: dict[str, Any] = await self.connection_receive()
            return message
        try:
            message = {"type": "http.request", "body": await self.read(), "more_body": False}
        except ClientDisconnected:
            return {"type": "http.disconnect"}
        self._is_replayed = True
        return message

    def close(self) -> None:
        """Give the bytes back to the budget."""
        self._budget.give_back(self._n_taken)
        self._n_taken = 0
        self._data = None

    async def _read(self, decoders: "list[Decoder]") -> bytes:
        announced = _header(self._scope, b"content-length")
        if announced.isdigit() and int(announced) > self._max_bytes:
            raise TooLarge(errors.TOO_LARGE)
        data = bytearray()
        has_more = True
        while has_more:
            message = await self.connection_receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            chunk = message.get("body", b"")
            has_more = message.get("more_body", False)
            for decoder in decoders:
                chunk = decoder.decode(chunk, self._max_bytes - len(data) + 1)
            if len(data) + len(chunk) > self._max_bytes:
                raise TooLarge(errors.TOO_LARGE)
            self._budget.take(len(chunk))
            self._n_taken += len(chunk)
            data += chunk
        for decoder in decoders:
            decoder.require_end()
        return bytes(data)


class Decoder:
    """Decodes a compressed body of one or several parts, piece by piece.

    Parts are members (RFC 1952, 2.2) or frames (RFC 8878, 3.1). `begin` makes the decompressor of
    one by its first bytes.
    """

    def __init__(self, coding: str, begin: Callable[[bytes], Any], fault: type[Exception]) -> None:
        self._coding = coding
        self._begin = begin
        self._fault = fault
        self._inner: Any = None
        self._n_parts = 0

    def decode(self, data: bytes, max_bytes: int) -> bytes:
        """Decoded body, cut after `max_bytes`."""
        plain = b""
        compressed = data
        try:
            while compressed and len(plain) < max_bytes:
                if self._inner is None or self._inner.eof:
                    self._inner = self._next(compressed)
                plain += self._inner.decompress(compressed, max_bytes - len(plain))
                compressed = self._inner.unused_data if self._inner.eof else b""
        except (self._fault, EOFError) as why:
            raise BadRequest(f"the body is no {self._coding} data: {why}") from why
        return plain

    def require_end(self) -> None:
        """Raise BadRequest for a body that ends before its data does."""
        if self._inner is None or not self._inner.eof:
            raise BadRequest(f"the {self._coding} data of the body is not complete")

    def _next(self, data: bytes) -> Any:
        self._n_parts += 1
        if self._n_parts > MAX_PARTS:
            raise EOFError(f"it has more than {MAX_PARTS} parts")
        return self._begin(data)


def _gzip() -> Decoder:
    return Decoder("gzip", lambda _: zlib.decompressobj(31), zlib.error)


def _deflate(data: bytes) -> Any:
    """Decompressor of zlib data, or of raw data.

    Some clients send the latter. The method of zlib data is 8 (RFC 1950, 2.2), which begins no raw
    data of a library.
    """
    return zlib.decompressobj(15 if data[0] & 0x0F == 8 else -15)


DECODERS: dict[str, Callable[[], Decoder]] = {
    "gzip": _gzip,
    "x-gzip": _gzip,
    "deflate": lambda: Decoder("deflate", _deflate, zlib.error),
    "zstd": lambda: Decoder("zstd", lambda _: zstd.ZstdDecompressor(), zstd.ZstdError),
}
KNOWN = ", ".join(name for name in DECODERS if not name.startswith("x-"))


def decoders_of(coding: str) -> list[Decoder]:
    """Decoders of a `Content-Encoding`, for the last coding first. Raises UnknownCoding."""
    names = [name.strip() for name in coding.lower().split(",")]
    names = [name for name in names if name not in {"", "identity"}]
    if len(names) > MAX_CODINGS or not set(names) <= DECODERS.keys():
        raise UnknownCoding(coding, KNOWN)
    return [DECODERS[name]() for name in reversed(names)]


def _header(scope: Any, name: bytes) -> str:
    """Value of a header, several joined; "" without one."""
    values = [value.decode("latin-1") for key, value in scope["headers"] if key == name]
    return ", ".join(values)


class JSONRequest(Request[Any, Any, Any]):
    """Request whose JSON is mended if it cannot be read."""

    async def json(self) -> Any:
        """Decoded body. Raises SerializationException, UnicodeDecodeError, RecursionError."""
        try:
            return await super().json()
        except (SerializationException, UnicodeDecodeError):
            body = await self.body()
            if (mended := mended_body(body)) == body:
                raise
            return decode_json(mended)


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode a body that may need mending. Raises as `msgspec.json.decode` does."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        if (mended := mended_body(body)) == body:
            raise
        return msgspec.json.decode(mended, type=kind)


def mended_body(body: bytes) -> bytes:
    """UTF-8 without byte order marks, with U+FFFD for lone surrogates."""
    for mark, coding in _MARKS:
        if body.startswith(mark):
            body = body.decode(coding, "replace").encode()
            break
    return _ESCAPES.sub(_mended, body.lstrip(codecs.BOM_UTF8))


def _mended(match: re.Match[bytes]) -> bytes:
    if match[1] is None:  # half of a pair, encoded as if it were a character
        return _REPLACEMENT.encode()
    return match[0] if match[2] else match[1] + rb"\ufffd"
