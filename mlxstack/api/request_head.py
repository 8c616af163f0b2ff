"""Request head: one canonical path, one host, one length, no other protocol."""

import posixpath
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from mlxstack.core.errors import BadRequest, StackError, UpgradeRefused

Header = tuple[bytes, bytes]

ABSOLUTE = ("http://", "https://")
WEBSOCKET = b"websocket"


def canonical_path(path: str) -> str:
    """Path without empty and dot segments, and without a slash at its end.

    Routers join slashes and drop the last one; decisions by the path see what they see.
    """
    return posixpath.normpath("/" + path.lstrip("/")) if path.startswith("/") else path


def normalize(scope: Any) -> None:
    """Give a scope its canonical path, and the host of an absolute request target.

    RFC 9112, 3.2.2: a server accepts the absolute form, and its host replaces the Host header.
    """
    path = scope["path"]
    if path.lower().startswith(ABSOLUTE):
        target = urlsplit(scope["raw_path"].decode("latin-1"))
        host, path = target.netloc.rpartition("@")[2], unquote(target.path) or "/"
        others = [header for header in scope["headers"] if header[0] != b"host"]
        scope["headers"] = [*others, (b"host", host.encode("latin-1"))]
    scope["path"] = canonical_path(path)
    scope["raw_path"] = quote(scope["path"]).encode("ascii")


def head_fault(headers: Sequence[Header], upgrade: bytes | None) -> StackError | None:
    """Reason to refuse a request by its head; None for a sound one.

    RFC 9112, 6.3: two lengths may be an attempt of request smuggling. RFC 9110, 15.5.22: clients
    that get 426 go on over HTTP.
    """
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in headers}:
        return BadRequest("content-length and transfer-encoding exclude each other; send one")
    if upgrade == WEBSOCKET:
        return UpgradeRefused("this service has no WebSockets; send the request over HTTP")
    return None
