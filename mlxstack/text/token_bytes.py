"""Bytes of single tokens."""

import re
from functools import cache
from typing import Any

from tokenizers.decoders import ByteLevel

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@cache
def _byte_of() -> dict[str, int]:
    """GPT-2's table: every byte as a printable character."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


class TokenBytes:
    """Bytes of the tokens of a mlx-lm TokenizerWrapper. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # The tokenizer rebuilds this table at each access.
        self._added = frozenset(getattr(tokenizer, "added_tokens_decoder", {}))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._is_byte_level = isinstance(getattr(backend, "decoder", None), ByteLevel)

    def of(self, token: int) -> bytes:
        """Bytes of `token` in a text; b"" if unknown."""
        piece: str | None = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if token in self._added:
            return piece.encode()
        if self._is_byte_level:
            table = _byte_of()
            return b"".join(bytes([table[c]]) if c in table else c.encode() for c in piece)
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("\u2581", " ").encode()
