"""Names for prefixes: a chain of SHA-256 keys over blocks of tokens.

key(i) = SHA-256(key(i - 1) + tokens of block i as little-endian uint32), key(-1) = SHA-256(salt).
Equal keys mean equal tokens from position 0 on, under the same salt (the identity's key and the
tenant's salt), so a key names KV wherever it lies.
"""

import hashlib
import struct
from collections.abc import Sequence

from msgspec import Struct

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


def extend(chain: BlockHashes, tokens: Sequence[int]) -> BlockHashes:
    """`chain` and the tokens after it; O(new tokens + number of keys)."""
    data = memoryview(chain.tail + pack(tokens))
    width = chain.block_size * TOKEN_BYTES
    n_full = len(data) // width
    keys = list(chain.keys)
    last = keys[-1] if keys else chain.root
    for at in range(0, n_full * width, width):
        last = _next(last, data[at : at + width])
        keys.append(last)
    tail = bytes(data[n_full * width :])
    return BlockHashes(chain.block_size, chain.root, tuple(keys), tail)


def hash_at(chain: BlockHashes, tokens: Sequence[int], position: int) -> bytes:
    """Hash of the first `position` of `tokens`, whose chain is `chain`."""
    n_full = position // chain.block_size
    last = chain.keys[n_full - 1] if n_full else chain.root
    rest = tokens[n_full * chain.block_size : position]
    return _next(last, pack(rest)) if rest else last


def segment_key(state: bytes, start: int) -> str:
    """Content address of KV of [start, end); `state` names [0, end)."""
    return hashlib.sha256(b"segment" + state + struct.pack("<Q", start)).hexdigest()


def checkpoint_key(state: bytes) -> str:
    """Content address of uncuttable layers after the tokens that `state` names."""
    return hashlib.sha256(b"checkpoint" + state).hexdigest()


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as little-endian uint32."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def _next(key: bytes, block: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(key)
    digest.update(block)
    return digest.digest()
