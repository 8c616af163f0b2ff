"""Answers of a peer that are false, malformed or without end, by name."""

import gzip
from collections.abc import Callable, Iterator
from itertools import repeat

import msgspec
from msgspec.structs import replace

from mlxstack.store.kv_file_format import decode, encode
from tests.endurance.bad_wire import Lie, Reply

MATCH = "POST /kv/match"
OFFER = "POST /kv/prefill"
MISSING = "POST /kv/missing"
FILE = "GET /kv/"
ADOPT = "PUT /v1/agents/"
FLOOD = 1 << 29
"""Bytes of a body that a client must not take whole."""

Alter = Callable[[bytes], bytes]


def fields(prefix: str, **changes: object) -> Lie:
    """These fields of the JSON of an answer are others."""

    def lie(reply: Reply) -> None:
        if reply.path.startswith(prefix) and reply.status == 200:
            reply.data = msgspec.json.encode(msgspec.json.decode(reply.data) | changes)

    return lie


def body(prefix: str, alter: Alter, *, length: int | None = None) -> Lie:
    """The body is another one; `length` is announced instead of its own."""

    def lie(reply: Reply) -> None:
        if reply.path.startswith(prefix):
            reply.data = alter(reply.data)
            reply.length = length

    return lie


def flood(prefix: str, first: bytes = b"", *, status: int = 200) -> Lie:
    """A body that goes on and on."""

    def parts() -> Iterator[bytes]:
        yield first
        yield from repeat(b" " * (1 << 20), FLOOD >> 20)

    def lie(reply: Reply) -> None:
        if reply.path.startswith(prefix):
            reply.status, reply.parts, reply.length = status, parts(), FLOOD + len(first)

    return lie


def answers(prefix: str, status: int, data: bytes, **headers: str) -> Lie:
    """Another answer altogether."""

    def lie(reply: Reply) -> None:
        if reply.path.startswith(prefix):
            reply.status = status
            reply.data = data
            reply.headers |= {name.replace("_", "-"): text for name, text in headers.items()}

    return lie


def segments(alter: Callable[[list[str]], list[str]]) -> Lie:
    """The files of an offer are others."""

    def lie(reply: Reply) -> None:
        if reply.path.startswith(OFFER) and reply.status == 200:
            offer = msgspec.json.decode(reply.data)
            reply.data = msgspec.json.encode(offer | {"segments": alter(offer["segments"])})

    return lie


def resigned(**changes: object) -> Lie:
    """A KV file with other contents and a checksum that fits them."""

    def lie(reply: Reply) -> None:
        if reply.path.startswith(FILE) and reply.status == 200:
            file = replace(decode(reply.data), **changes)
            reply.data = b"".join(encode(file))

    return lie


def headless(reply: Reply) -> None:
    """The header of a KV file announces 2^63 bytes."""
    if reply.path.startswith(FILE):
        reply.data = (1 << 63).to_bytes(8, "little") + reply.data[8:]


def wants_all(reply: Reply) -> None:
    """The same file is wanted again and again, and some that were not offered."""
    if reply.path.startswith(MISSING) and reply.status == 200:
        asked = msgspec.json.decode(reply.data)
        keys = [*asked["keys"] * 2000, "../../x", "ab" * 32]
        reply.data = msgspec.json.encode(asked | {"keys": keys})


def zipped(reply: Reply) -> None:
    """A small body that unpacks to 256 MiB."""
    if reply.path.startswith(MATCH):
        reply.status, reply.data = 200, gzip.compress(b" " * (1 << 28), 9)
        reply.headers["content-encoding"] = "gzip"


OF_PROMPTS: dict[str, Lie] = {
    "match: more tokens than there are": fields(MATCH, n_tokens=10**30, is_idle=True),
    "match: fewer than none": fields(MATCH, n_tokens=-(10**9)),
    "match: infinite speed": fields(MATCH, prefill_tps=1e308, is_idle=True),
    "match: no speed at all": fields(MATCH, prefill_tps=5e-324, is_idle=True),
    "match: negative speed": fields(MATCH, prefill_tps=-1.0, is_idle=True),
    "match: text for a number": fields(MATCH, n_tokens="many"),
    "match: no JSON": body(MATCH, lambda data: b"<html>"),
    "match: half of it": body(MATCH, lambda data: data[: len(data) // 2]),
    "match: less than announced": body(MATCH, lambda data: data, length=100_000),
    "match: a flood": flood(MATCH, b'{"n_tokens":600,"is_idle":true}'),
    "match: a flood as an error": flood(MATCH, status=500),
    "match: a small body that unpacks to a large one": zipped,
    "match: a broken encoding": answers(MATCH, 200, b"zip", content_encoding="gzip"),
    "match: elsewhere": answers(MATCH, 302, b"", location="http://127.0.0.1:1/"),
    "offer: a flood": flood(OFFER, b'{"n_tokens":600}'),
    "offer: more tokens than asked": fields(OFFER, n_tokens=10**6),
    "offer: fewer tokens than none": fields(OFFER, n_tokens=-5),
    "offer: one token more": fields(OFFER, n_tokens=700),
    "offer: less than no bytes": fields(OFFER, n_bytes=-1),
    "offer: too many bytes": fields(OFFER, n_bytes=1 << 50),
    "offer: fewer bytes than they are": fields(OFFER, n_bytes=1),
    "offer: no files": segments(lambda keys: []),
    "offer: the first file only": segments(lambda keys: keys[:1]),
    "offer: not the first file": segments(lambda keys: keys[1:]),
    "offer: the files backwards": segments(lambda keys: keys[::-1]),
    "offer: each file twice": segments(lambda keys: keys * 2),
    "offer: a million files": segments(lambda keys: ["ab" * 32] * 10**6),
    "offer: files that do not exist": segments(lambda keys: ["cd" * 32]),
    "offer: a path": segments(lambda keys: ["../../../etc/passwd"]),
    "offer: checkpoints that are none": fields(OFFER, checkpoints=["ab" * 32]),
    "file: a flood": flood(FILE),
    "file: a flood as an error": flood(FILE, status=500),
    "file: empty": body(FILE, lambda data: b""),
    "file: half of it": body(FILE, lambda data: data[: len(data) // 2]),
    "file: something behind its end": body(FILE, lambda data: data + b"x"),
    "file: another bit": body(FILE, lambda data: data[:-9] + bytes([data[-9] ^ 4]) + data[-8:]),
    "file: a header without end": headless,
    "file: signed, of another key": resigned(key="ab" * 32),
    "file: signed, of another model": resigned(identity="ab" * 16),
    "file: signed, of other tokens": resigned(meta="{}"),
    "file: signed, of another range": resigned(start=128),
    "file: signed, of another kind": resigned(kind="checkpoint"),
    "file: signed, without tensors": resigned(tensors=()),
    "file: a partial answer that was not wanted": answers(
        FILE, 206, b"abc", content_range="bytes 5-7/8"
    ),
    "file: a broken encoding of an error": answers(FILE, 500, b"zip", content_encoding="gzip"),
    "file: a name that is no text": answers(FILE, 200, b"", etag="\xe9\xff"),
    "file: gone": answers(FILE, 404, b"{}"),
}
HARMLESS = {
    "match: more tokens than there are",
    "match: fewer than none",
    "match: infinite speed",
    "match: no speed at all",
    "match: negative speed",
    "offer: fewer tokens than none",
}
"""Lies after which a peer may be used again at once."""
OF_MOVES: dict[str, Lie] = {
    "missing: everything, again and again": wants_all,
    "missing: nothing": fields(MISSING, keys=[]),
    "missing: no JSON": body(MISSING, lambda data: b"[]"),
    "missing: a flood": flood(MISSING, b'{"identity":"","keys":[]}'),
    "file: refused": answers("PUT /kv/", 507, b'{"error":{"message":"full"}}'),
    "file: a flood as an error": flood("PUT /kv/", status=500),
    "adopted: no JSON": body(ADOPT, lambda data: b"yes"),
    "adopted: a flood": flood(ADOPT, b'{"n_tokens":1}'),
    "adopted: an error though it was": answers(ADOPT, 500, b"{}"),
    "adopted: less than announced": body(ADOPT, lambda data: data[:4], length=999),
}
