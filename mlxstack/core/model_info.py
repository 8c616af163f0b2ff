"""Facts about a loaded model, and the identity of its KV."""

import hashlib

import msgspec
from msgspec import Struct, field


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


class SamplingDefaults(Struct, frozen=True):
    """Sampling defaults of generation_config.json; None where it has none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class Weights(Struct, frozen=True):
    """Weights by storage: `packed` quantized bytes, plain floats by size."""

    packed: int = 0
    n_half: int = 0
    n_single: int = 0

    def plus(self, other: "Weights") -> "Weights":
        """Both together."""
        sums = (self.packed + other.packed, self.n_half + other.n_half)
        return Weights(*sums, self.n_single + other.n_single)

    def n_bytes(self, half_bytes: int = 2) -> int:
        """Bytes in memory; `half_bytes` is 4 where half precision is widened.

        MLX widens it on a CPU.
        """
        return self.packed + self.n_half * half_bytes + self.n_single * 4


class ModelFacts(Struct, frozen=True):
    """`n_ctx_train` is the trained context in tokens, `n_bytes` the weights in memory.

    `accepts_images`: images are served.
    """

    id: str
    path: str
    identity: Identity
    architecture: str
    n_vocab: int
    n_ctx_train: int
    n_params: int
    n_bytes: int
    eos: frozenset[int]
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    accepts_images: bool = False
