"""Facts about a loaded model, and the identity of its KV."""

import hashlib

import msgspec
from msgspec import Struct, field


class Identity(Struct, frozen=True):
    """Salt of every block key and header of every stored file.

    `weights` is a digest of the weight files; `kv` describes the cache of every layer as the
    engine built it (kinds, heads, dims, dtype). `code` is a digest of the model's own code and of
    settings beside its config.json, `mlx_lm` the version that computes it, `kv_format` the version
    of the KV files, and of images for a model that takes them: releases with different formats
    never meet each other's files. The tokenizer
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


class ModelFacts(Struct, frozen=True):
    """`n_ctx_train` is the trained context in tokens, `n_bytes` the weights in memory.

    `n_vocab` tokens have a row in embedding and head. A context is at most `n_positions` tokens,
    where positions are learned; 0: they are not. `accepts_images`: images are served. `text_prompt`
    stands before each text that is embedded, `text_end` after it; such a text has at most
    `max_text_tokens`, 0 for any number.
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
    n_positions: int = 0
    text_prompt: str = ""
    text_end: int | None = None
    max_text_tokens: int = 0
