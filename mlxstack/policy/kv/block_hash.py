"""Names for prefixes: a chain of SHA-256 keys over blocks of tokens.

key(i) = SHA-256(key(i - 1) + tokens of block i as little-endian uint32), key(-1) = SHA-256(salt).
Where images begin in block i, it is SHA-256("images" + that key + the digests of the images).
Equal keys mean equal tokens and images from position 0 on, under the same salt (the identity's key
and the tenant's salt), so a key names KV wherever it lies.
"""

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Sequence

from msgspec import Struct

from mlxstack.core.prompt_tokens import ImageRange, TokenRow

TOKEN_BYTES = 4


class BlockHashes(Struct, frozen=True):
    """Block hashes of a token list, and its tokens after the last.

    `keys[i]` names the tokens [0, (i + 1) * block_size). Extending hashes only what is new.
    """

    block_size: int
    root: bytes
    keys: tuple[bytes, ...] = ()
    tail: bytes = b""

    @property
    def n_tokens(self) -> int:
        """Tokens hashed or waiting in the tail."""
        return len(self.keys) * self.block_size + len(self.tail) // TOKEN_BYTES


def salt(identity: str, tenant: str = "") -> bytes:
    """The salt of a chain: `Identity.key()` and the request's own `cache_salt`."""
    return f"{identity}\n{tenant}".encode()


def start(salt: bytes, block_size: int) -> BlockHashes:
    """The chain of no tokens."""
    return BlockHashes(block_size=block_size, root=hashlib.sha256(salt).digest())


def extend(chain: BlockHashes, row: TokenRow, end: int | None = None) -> BlockHashes:
    """Chain of the tokens of `row` before `end`.

    The first ones are those of `chain`. O(new tokens + number of keys).
    """
    data = memoryview(chain.tail + pack(row.tokens[chain.n_tokens : end]))
    size = chain.block_size
    width = size * TOKEN_BYTES
    n_full = len(data) // width
    keys = list(chain.keys)
    last = keys[-1] if keys else chain.root
    for offset in range(0, n_full * width, width):
        start = len(keys) * size
        images = _beginning(row.images, start, start + size)
        last = _next(last, data[offset : offset + width], images)
        keys.append(last)
    tail = bytes(data[n_full * width :])
    return BlockHashes(chain.block_size, chain.root, tuple(keys), tail)


def hash_at(chain: BlockHashes, row: TokenRow, position: int) -> bytes:
    """Hash of the first `position` tokens of `row`, whose chain is `chain`."""
    n_full = position // chain.block_size
    last = chain.keys[n_full - 1] if n_full else chain.root
    start = n_full * chain.block_size
    if start == position:
        return last
    images = _beginning(row.images, start, position)
    return _next(last, pack(row.tokens[start:position]), images)


def segment_key(state: bytes, start: int) -> str:
    """Content address of KV of [start, end); `state` names [0, end)."""
    return hashlib.sha256(b"segment" + state + struct.pack("<Q", start)).hexdigest()


def checkpoint_key(state: bytes) -> str:
    """Content address of uncuttable layers after the tokens that `state` names."""
    return hashlib.sha256(b"checkpoint" + state).hexdigest()


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as little-endian uint32."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def _beginning(images: Sequence[ImageRange], start: int, end: int) -> Sequence[ImageRange]:
    """Images that begin at the positions `[start, end)`."""
    first = bisect_left(images, start, key=lambda image: image.start)
    after = bisect_left(images, end, key=lambda image: image.start)
    return images[first:after]


def _next(key: bytes, block: bytes | memoryview, images: Sequence[ImageRange]) -> bytes:
    hashed = hashlib.sha256(key)
    hashed.update(block)
    if not images:
        return hashed.digest()
    digests = b"".join(image.digest for image in images)
    return hashlib.sha256(b"images" + hashed.digest() + digests).digest()
