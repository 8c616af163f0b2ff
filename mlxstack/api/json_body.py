"""JSON of request bodies, mended where a character is incomplete.

Half of a surrogate pair stays in the history of such a client, so that a refusal would end its
conversation for good.
"""

import codecs
import re
from typing import TypeVar

import msgspec

T = TypeVar("T")

_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
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


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode a body that may need mending. Raises as `msgspec.json.decode` does."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        if (mended := mended_body(body)) == body:
            raise
        return msgspec.json.decode(mended, type=kind)


def mended_body(body: bytes) -> bytes:
    """UTF-8 without byte order mark, with U+FFFD for lone surrogates."""
    for mark, coding in _MARKS:
        if body.startswith(mark):
            body = body.decode(coding, "replace").encode()
            break
    return _ESCAPES.sub(_mended, body.removeprefix(codecs.BOM_UTF8))


def _mended(match: re.Match[bytes]) -> bytes:
    if match[1] is None:  # half of a pair, encoded as if it were a character
        return _REPLACEMENT.encode()
    return match[0] if match[2] else match[1] + rb"\ufffd"
