"""Fuzzes what lies on disk: slot files, manifests, histories and KV files, header and body."""

import io
from collections.abc import Callable

import xxhash

from mlxstack.core.errors import Damaged
from mlxstack.store import kv_file_format
from mlxstack.store.agent_history import HistoryFile
from mlxstack.store.files import parse_json
from mlxstack.store.manifest_file import LINE, from_json, unpack
from tests.fuzz.dice import Dice


def files(data: bytes) -> None:
    """Raises what is not Damaged."""
    dice = Dice(data)
    read, content = dice.pick(KINDS)
    whole = content(dice)
    try:
        read(whole)
    except Damaged as error:
        assert error.message.strip()


def _slot_file(dice: Dice) -> bytes:
    """With a checksum that fits, so that the body is read."""
    body = dice.rest()
    digest = xxhash.xxh3_128(LINE)
    digest.update(body)
    return LINE + digest.digest() + body


def _manifest(dice: Dice) -> bytes:
    body = dice.rest()
    head = b'{"format":"mlx-stack.manifest","version":1,"checksum":"'
    return head + xxhash.xxh3_128_hexdigest(body).encode() + b'","manifest":' + body + b"}"


def _kv_file(dice: Dice) -> bytes:
    """A header that begins as ours, with a checksum that fits."""
    payload = dice.take(dice.below(40))
    planes = b'"},"0":{"dtype":"' + dice.pick((b"F16", b"U8", b"F4", b"")) + b'","shape":['
    n = str(dice.number()).encode()
    planes += n + b'],"data_offsets":[0,' + dice.pick((n, str(len(payload)).encode())) + b"]}"
    metadata = b'","kind":"segment","identity":"i","key":"k","start":"0","end":"9","meta":"'
    metadata += planes + b"}" if dice.chance(80) else dice.rest()
    head = kv_file_format.HEAD + kv_file_format.BLANK + metadata
    size = dice.pick((len(head), len(head), 0, 1 << 60, len(head) + 1))
    whole = bytearray(size.to_bytes(8, "little") + head + payload)
    whole[kv_file_format.DIGITS] = xxhash.xxh3_128_hexdigest(bytes(whole)).encode()
    return bytes(whole)


def _raw(dice: Dice) -> bytes:
    return dice.rest()


def _head(whole: bytes) -> object:
    return kv_file_format.read_head(io.BytesIO(whole))


def _pour(whole: bytes) -> object:
    return kv_file_format.read_into(io.BytesIO(whole), [memoryview(bytearray(8))])


def _history(whole: bytes) -> object:
    return parse_json(whole, HistoryFile)


KINDS: tuple[tuple[Callable[[bytes], object], Callable[[Dice], bytes]], ...] = (
    (unpack, _slot_file),
    (from_json, _manifest),
    (kv_file_format.decode, _kv_file),
    (_head, _kv_file),
    (_pour, _kv_file),
    (unpack, _raw),
    (from_json, _raw),
    (kv_file_format.decode, _raw),
    (_head, _raw),
    (_history, _raw),
)
