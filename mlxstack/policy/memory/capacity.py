"""Capacity: memory that a service needs, agents and context that fit."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.policy.attention_kernels import FULL_DIMS
from mlxstack.policy.kv.live_sharing import MOST_SPARE
from mlxstack.policy.kv.prefix_index import CUT
from mlxstack.policy.memory.kv_geometry import PLAIN_BITS, Geometry, LayerKind, ModelShape

TABLE_BYTES = 640
"""Bytes of the grammar compiler's table for a token of the vocabulary (llguidance 1.7)."""

SCORE_COPIES = 2
"""Copies of scores without fused attention: scores and their softmax."""

MAX_SCORE_BYTES = 2**30
"""Bytes of attention scores per chunk; long contexts get shorter chunks."""


def workspace_bytes(shape: ModelShape, chunk: int, n_slots: int = 1) -> int:
    """Upper estimate of activations, logits and the grammar compiler's table."""
    heads, dim = shape.n_heads, shape.hidden // max(1, shape.n_heads)
    dim = max((layer.k_dim for layer in shape.geometry.layers), default=dim) or dim
    per_token = 6 * shape.hidden + 3 * shape.inner + 2 * heads * dim
    logits = shape.n_vocab * 4 * (n_slots + 1)
    table = shape.n_vocab * TABLE_BYTES
    return int(per_token * chunk * shape.geometry.element_bytes + logits + table)


def score_bytes(shape: ModelShape, bits: int) -> int:
    """Bytes of attention scores per query and context token; 0: fused.

    `bits` is the KV precision: attention over quantized KV is never fused on a GPU.
    """
    each = shape.n_heads * shape.geometry.element_bytes * SCORE_COPIES
    return 0 if _is_fused(shape.geometry, bits) else each


def peak_score_bytes(shape: ModelShape, bits: int, chunk: int, n_ctx: int) -> int:
    """Peak bytes of attention scores in a prefill of `n_ctx` tokens.

    On a GPU.
    """
    return min(MAX_SCORE_BYTES, score_bytes(shape, bits) * chunk * n_ctx)


def _is_fused(geometry: Geometry, bits: int) -> bool:
    return bits == PLAIN_BITS and all(
        (layer.k_dim, layer.v_dim) in FULL_DIMS
        if layer.kind is LayerKind.FULL
        else layer.kind is not LayerKind.LATENT
        for layer in geometry.layers
    )


MARGIN_BYTES = 64 * 1024 * 1024
"""Tokenizer, compiled kernels, and what else a process holds beside the model."""

HEADER_BYTES = 4096
"""Header and padding of one stored file."""


class Budget(Struct, frozen=True):
    """KV budget: `pct` percent of `total` bytes of memory."""

    total: int
    pct: float

    @property
    def n_bytes(self) -> int:
        """Bytes that the engine gives to KV, live and parked together."""
        return int(self.total * self.pct / 100)

    def holding(self, n_bytes: int) -> "Budget":
        """This budget, or the next whole percent that holds `n_bytes`."""
        if n_bytes <= self.n_bytes:
            return self
        pct = -(-n_bytes * 100 // self.total)
        larger = replace(self, pct=pct)
        return larger if n_bytes <= larger.n_bytes else replace(self, pct=pct + 1)


class ServiceLoad(Struct, frozen=True):
    """Load of a service: weights and workspace in bytes, slots, context.

    `chunk` is the longest prefill chunk; windows are larger while it runs.
    `budget` bounds the KV of all slots; None is no bound but the memory itself. Each slot has a
    context of the draft model too; the weights are those of both models. The slots hold one copy of
    their first `n_shared` tokens.
    """

    geometry: Geometry
    weights: int
    workspace: int = 0
    n_slots: int = 1
    n_ctx: int = 4096
    chunk: int = 512
    budget: Budget | None = None
    draft: Geometry = Geometry(())
    n_shared: int = 0


class MemoryNeed(Struct, frozen=True):
    """Bytes by cause; `kv_full` grows with context, `kv_state` is bounded."""

    weights: int
    kv_full: int
    kv_state: int
    workspace: int
    margin: int = MARGIN_BYTES

    @property
    def kv(self) -> int:
        """Bytes of the live contexts."""
        return self.kv_full + self.kv_state

    @property
    def total(self) -> int:
        """All bytes together."""
        return self.weights + self.kv + self.workspace + self.margin


def need(load: ServiceLoad) -> MemoryNeed:
    """Peak bytes of this load: all slots full, one of them prefilling."""
    drafts = load.draft.peak_state_bytes(load.n_ctx, load.chunk)
    settled = load.geometry.peak_state_bytes(load.n_ctx, 1) + drafts
    in_prefill = load.geometry.peak_state_bytes(load.n_ctx, load.chunk) + drafts
    full = sum(one.peak_full_bytes(load.n_ctx) for one in (load.geometry, load.draft))
    return MemoryNeed(
        weights=load.weights,
        kv_full=full * load.n_slots - _shared_bytes(load),
        kv_state=settled * (load.n_slots - 1) + in_prefill,
        workspace=load.workspace,
    )


def _shared_bytes(load: ServiceLoad) -> int:
    """Bytes saved by one copy, which may have room to spare."""
    if load.n_slots < 2:
        return 0
    n_tokens = min(load.n_shared, load.n_ctx)
    return int(load.geometry.full_bytes(n_tokens) * (load.n_slots - 1 - MOST_SPARE))


def kv_budget(limit: int, weights: int, workspace: int) -> int:
    """Bytes of `limit` beside weights and workspace; may be negative."""
    return limit - weights - workspace - MARGIN_BYTES


def fits(load: ServiceLoad, memory: int) -> bool:
    """Whether `memory` usable bytes and the KV budget hold this load."""
    parts = need(load)
    return parts.total <= memory and (load.budget is None or parts.kv <= load.budget.n_bytes)


def max_agents(load: ServiceLoad, memory: int) -> int:
    """Number of slots of `load.n_ctx` tokens that fit. `load.n_slots` is ignored."""
    first = [need(replace(load, n_slots=n)) for n in (1, 2, 3)]
    n_agents = _more([one.total for one in first], memory)
    if load.budget is None:
        return n_agents
    return min(n_agents, _more([one.kv for one in first], load.budget.n_bytes))


def _more(first: Sequence[int], bound: int) -> int:
    """Number that fits `bound` bytes; one, two and three take the `first`, others as the third."""
    one, two, three = first
    if two > bound or two == one:
        return int(one <= bound)
    return 2 + (bound - two) // (three - two) if three > two else 2


def max_ctx(load: ServiceLoad, memory: int) -> int:
    """Most tokens per slot for `load.n_slots` slots, 0 if none; binary search."""
    low, high = 0, 1 << 24
    while low < high:
        middle = (low + high + 1) // 2
        if fits(replace(load, n_ctx=middle), memory):
            low = middle
        else:
            high = middle - 1
    return low


def disk_bytes(geometry: Geometry, n_tokens: int, n_checkpoints: int = 1) -> int:
    """One saved agent: segments once, and the states at its checkpoints."""
    if n_tokens <= 0:
        return 0
    checkpoints = 0 if geometry.is_sliceable else n_checkpoints
    n_files = -(-n_tokens // CUT) + checkpoints
    states = geometry.state_bytes(n_tokens) * checkpoints
    return geometry.full_bytes(n_tokens) + states + n_files * HEADER_BYTES
