"""What KV depends on: two contexts may share KV only when their identities are equal."""

import hashlib

import msgspec
from msgspec import Struct


class Identity(Struct, frozen=True):
    """Salt of every block key and header of every stored file.

    `weights` is a digest of the weight files; `kv` describes the cache of every layer as the
    engine built it (kinds, heads, dims, dtype). `code` is a digest of the model's own code and of
    settings beside its config.json, `mlx_lm` the version that computes it, `kv_format` the version
    of the KV files: releases with different formats never meet each other's files. The tokenizer
    has no place here: the keys are made of tokens.
    """

    model: str
    weights: str
    adapter: str = ""
    kv: str = ""
    kv_bits: int = 16
    code: str = ""
    mlx_lm: str = ""
    kv_format: str = ""

    def key(self) -> str:
        """32 hex digits that stand for this identity in paths and keys."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]
