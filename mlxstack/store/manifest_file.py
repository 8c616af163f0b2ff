"""Manifest formats: compact for slot files, JSON for agents.

Compact: one line "mlx-stack slot file 1", 16 bytes xxh3_128 of everything else, msgpack.
JSON: format, version, checksum (xxh3_128 of the text of `manifest`), manifest.
"""

import msgspec
import xxhash
from msgspec import Struct

from mlxstack.core.errors import Damaged, UnknownVersion
from mlxstack.core.interfaces import Manifest
from mlxstack.store.files import UNREADABLE, parse_json

MAGIC = b"mlx-stack slot file "
VERSION = 1
LINE = MAGIC + b"%d\n" % VERSION
N_DIGEST = 16
FORMAT = "mlx-stack.manifest"


class About(Struct, frozen=True):
    """Format and version of a JSON file, whatever else is in it."""

    format: str
    version: int


class Envelope(Struct, frozen=True, forbid_unknown_fields=True):
    """A manifest in JSON, with what it takes to trust it."""

    format: str
    version: int
    checksum: str
    manifest: msgspec.Raw


def pack(manifest: Manifest) -> list[bytes]:
    """The compact file as chunks."""
    body = msgspec.msgpack.encode(manifest)
    return [LINE, _digest(body), body]


def unpack(data: bytes) -> Manifest:
    """Raises Damaged saying what is wrong with a compact file, or UnknownVersion."""
    if not data.startswith(MAGIC):
        raise Damaged("it is no slot file of mlx-stack")
    if not data.startswith(LINE):
        version = data[len(MAGIC) :].split(b"\n")[0][:20].decode(errors="replace")
        raise UnknownVersion(f"it has format version {version}, this release reads {VERSION}")
    digest = data[len(LINE) :][:N_DIGEST]
    body = data[len(LINE) + N_DIGEST :]
    if digest != _digest(body):
        raise Damaged(f"its checksum does not match its {len(data)} bytes: altered or truncated")
    try:
        return msgspec.msgpack.decode(body, type=Manifest)
    except UNREADABLE as error:
        raise Damaged(f"it holds no manifest: {error}") from None


def to_json(manifest: Manifest) -> bytes:
    """The JSON file."""
    text = msgspec.json.encode(manifest)
    envelope = Envelope(FORMAT, VERSION, xxhash.xxh3_128_hexdigest(text), msgspec.Raw(text))
    return msgspec.json.encode(envelope)


def from_json(data: bytes) -> Manifest:
    """Raises Damaged saying what is wrong with a JSON file, or UnknownVersion."""
    about = parse_json(data, About)
    if about.format != FORMAT:
        raise Damaged(f"it is a {about.format}, not a manifest")
    if about.version != VERSION:
        raise UnknownVersion(f"it has format version {about.version}, this release reads {VERSION}")
    envelope = parse_json(data, Envelope)
    if envelope.checksum != xxhash.xxh3_128_hexdigest(envelope.manifest):
        raise Damaged("its checksum does not match: some byte of it was altered")
    return parse_json(bytes(envelope.manifest), Manifest)


def _digest(body: bytes) -> bytes:
    digest = xxhash.xxh3_128(LINE)
    digest.update(body)
    return digest.digest()
