"""Capacity: KV bytes by layer, memory of a service, agents that fit."""

from collections.abc import Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.errors import Unsupported
from mlxstack.core.preset import Preset
from mlxstack.policy.attention_kernels import FULL_DIMS
from mlxstack.policy.kv.prefix_index import CUT

STEP = 256
"""Tokens by which mlx-lm grows a cache."""

SLACK = 2 * (STEP - 1)
"""The most tokens by which an mlx-lm cache is larger than needed.

It grows by whole steps; where it stands at a multiple of STEP it keeps what it had to spare.
"""

PLAIN_BITS = 16
QUANTIZED_BITS = (4, 8)


class LayerKind(StrEnum):
    """Kind of a layer's cache: growth, and whether it can be cut.

    FULL and LATENT keep every token, so any prefix is a slice. SLIDING keeps the last `window`
    tokens, CHUNKED those of the current chunk, RECURRENT a state of fixed size: these exist at
    one token position only. SHARED reads another layer's cache and owns none.
    """

    FULL = "full"
    LATENT = "latent"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    RECURRENT = "recurrent"
    SHARED = "shared"


SLICEABLE = frozenset({LayerKind.FULL, LayerKind.LATENT, LayerKind.SHARED})


class Division(StrEnum):
    """Division of a model between machines.

    TENSOR: each has a part of every layer. PIPELINE: each has layers of its own.
    """

    NONE = "none"
    TENSOR = "tensor"
    PIPELINE = "pipeline"


class Layer(Struct, frozen=True):
    """Cache of one layer: heads and dims, or bytes of a state."""

    kind: LayerKind
    k_heads: int = 0
    k_dim: int = 0
    v_heads: int = 0
    v_dim: int = 0
    window: int = 0
    state_bytes: int = 0


class Geometry(Struct, frozen=True):
    """Every layer, and how numbers are stored.

    `element_bytes` is the size of an unquantized number. Only FULL layers are quantized to
    `bits`, in groups of `group_size` numbers with one scale and one bias each: mlx-lm has no
    quantized rotating cache, and MLX no quantized attention with sinks.
    """

    layers: tuple[Layer, ...]
    element_bytes: int = 2
    bits: int = PLAIN_BITS
    group_size: int = 64
    has_sinks: bool = False

    @property
    def is_sliceable(self) -> bool:
        """Whether any prefix of a context can be reused without a checkpoint."""
        return all(layer.kind in SLICEABLE for layer in self.layers)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that keep every token."""
        kinds = (LayerKind.FULL, LayerKind.LATENT)
        return tuple(i for i, layer in enumerate(self.layers) if layer.kind in kinds)

    @property
    def growth(self) -> int:
        """Bytes that one more token costs once every window is full."""
        return sum(self.token_bytes(self.layers[i]) for i in self.full_layers)

    def token_bytes(self, layer: Layer) -> int:
        """Bytes per token in one layer; 0 for recurrent or shared ones."""
        return layer.k_heads * self._vector_bytes(layer, layer.k_dim) + (
            layer.v_heads * self._vector_bytes(layer, layer.v_dim)
        )

    def state_bytes(self, n_tokens: int, chunk: int = 0) -> int:
        """Bytes of uncuttable layers at `n_tokens`: the size of a checkpoint.

        With a `chunk` their peak up to there: a window holds at most W - 1 + chunk tokens.
        """
        return sum(
            layer.state_bytes * (n_tokens > 0)
            + self.token_bytes(layer) * _bounded_rows(layer, n_tokens, chunk)
            for layer in self.layers
            if layer.kind not in SLICEABLE
        )

    def n_bytes(self, n_tokens: int) -> int:
        """Bytes in use by a context of `n_tokens`, windows trimmed."""
        return self.growth * n_tokens + self.state_bytes(n_tokens)

    def peak_full_bytes(self, n_tokens: int) -> int:
        """Peak bytes of full layers, which keep every token, at `n_tokens`.

        Each wastes at most SLACK tokens.
        """
        return self.growth * (n_tokens + SLACK if n_tokens else 0)

    def _vector_bytes(self, layer: Layer, dim: int) -> int:
        if layer.kind is not LayerKind.FULL or self.bits == PLAIN_BITS:
            return dim * self.element_bytes
        return dim * self.bits // 8 + 2 * (dim // self.group_size) * self.element_bytes


class Weights(Struct, frozen=True):
    """Weights by storage: `packed` quantized bytes, plain floats by size."""

    packed: int = 0
    n_half: int = 0
    n_single: int = 0

    def plus(self, more: "Weights") -> "Weights":
        sums = (self.packed + more.packed, self.n_half + more.n_half)
        return Weights(*sums, self.n_single + more.n_single)

    def n_bytes(self, half_bytes: int = 2) -> int:
        """Bytes in memory; `half_bytes` is 4 where half precision is widened.

        MLX widens it on a CPU.
        """
        return self.packed + self.n_half * half_bytes + self.n_single * 4


class ModelShape(Struct, frozen=True):
    """The caches, weights and widths of a model, as mlx-lm builds it.

    `widened` is the geometry where MLX computes in float32. `weights` is None where only the
    files tell their precision. `division` is how several machines can compute it together. `head`
    are the weights that an MTP head of this model would have. `ignored_scaling` is the type
    of a scaling in its config that it does not compute.
    """

    geometry: Geometry
    widened: Geometry
    weights: Weights | None
    hidden: int
    n_heads: int
    inner: int
    n_vocab: int
    division: Division = Division.NONE
    has_scaled_rope: bool = False
    head: Weights = Weights()
    ignored_scaling: str = ""


class ShapeReply(Struct, frozen=True):
    """Shape of a model, or the error; `param` names the config key."""

    shape: ModelShape | None = None
    refusal: str = ""
    param: str = ""


def quantized(geometry: Geometry, bits: int, group_size: int = 64) -> Geometry:
    """The same layers with full-attention KV in `bits`. Raises Unsupported."""
    if bits == PLAIN_BITS:
        return replace(geometry, bits=bits, group_size=group_size)
    if bits not in QUANTIZED_BITS:
        raise Unsupported(f"KV of {bits} bits is not stored; use 16, 8 or 4", "kv.bits")
    if geometry.has_sinks:
        raise Unsupported("MLX has no quantized attention with sinks; use kv.bits 16", "kv.bits")
    full = [layer for layer in geometry.layers if layer.kind is LayerKind.FULL]
    dims = {dim for layer in full for dim in (layer.k_dim, layer.v_dim)}
    if odd := sorted(dim for dim in dims if dim % group_size):
        raise Unsupported(
            f"KV heads of {odd[0]} numbers cannot be quantized in groups of {group_size}; "
            "use kv.bits 16 or a smaller kv.group_size",
            "kv.group_size",
        )
    return replace(geometry, bits=bits, group_size=group_size)


def divided(geometry: Geometry, n_ranks: int, division: Division) -> Geometry:
    """Geometry of the rank with the most KV. Raises Unsupported."""
    if division is not Division.PIPELINE:
        return replace(geometry, layers=tuple(_share(layer, n_ranks) for layer in geometry.layers))
    parts = stages([layer.kind for layer in geometry.layers], n_ranks)
    ranks = [replace(geometry, layers=geometry.layers[part.start : part.stop]) for part in parts]
    return max(ranks, key=lambda rank: rank.growth)


def stages(kinds: Sequence[str], n_ranks: int) -> list[range]:
    """Layers of each rank of a pipeline. Raises Unsupported.

    Rank 0 has the last ones. Each rank needs all kinds of layers: rank 0 decides for all where a
    context can be cut.
    """
    n_each, n_more = divmod(len(kinds), n_ranks)
    parts = list[range]()
    end = len(kinds)
    for rank in range(n_ranks):
        parts.append(range(end - n_each - (rank < n_more), end))
        end = parts[-1].start
    if any(set(kinds[part.start : part.stop]) != set(kinds) for part in parts):
        raise Unsupported(
            f"its {len(kinds)} layers do not give each of {n_ranks} machines a layer of every "
            "kind; use fewer machines",
            "hosts",
        )
    return parts


def _share(layer: Layer, n_ranks: int) -> Layer:
    """Part of a layer; latents are not divided."""
    if layer.kind is LayerKind.LATENT:
        return layer
    return replace(
        layer,
        k_heads=-(-layer.k_heads // n_ranks),
        v_heads=-(-layer.v_heads // n_ranks),
        state_bytes=-(-layer.state_bytes // n_ranks),
    )


def _bounded_rows(layer: Layer, n_tokens: int, chunk: int) -> int:
    slack = SLACK if chunk else 0
    if layer.kind is LayerKind.SLIDING:
        in_place = min(n_tokens + slack, layer.window)
        return max(in_place, min(n_tokens, layer.window - 1 + chunk))
    if layer.kind is LayerKind.CHUNKED:
        return min(n_tokens + slack, layer.window + chunk + slack)
    return 0


TABLE_BYTES = 640
"""Bytes of the grammar compiler's table for a token of the vocabulary (llguidance 1.7)."""

SCORE_COPIES = 2
"""Copies of scores without fused attention: scores and their softmax."""

SCORE_SHARE = 0.04
MAX_SHARED_SCORE_BYTES = 2 * 2**30
"""Limit of attention scores per chunk: share of the working set, bytes.

Long contexts get shorter chunks. More would gain a few percent of prefill and cost KV.
"""
MAX_SCORE_BYTES = 2**30
"""The same for an unknown working set, as that of another machine."""


def workspace_bytes(shape: ModelShape, chunk: int, n_slots: int = 1, half_bytes: int = 2) -> int:
    """Upper estimate of activations, logits and the grammar compiler's table.

    `half_bytes` is 4 where half precision is widened.
    """
    logits = shape.n_vocab * 4 * (n_slots + 1)
    table = shape.n_vocab * TABLE_BYTES
    return activation_bytes(shape, chunk, half_bytes) + logits + table


def activation_bytes(shape: ModelShape, chunk: int, half_bytes: int = 2) -> int:
    """Upper estimate of the activations of a layer."""
    heads = shape.n_heads
    dim = shape.hidden // max(1, shape.n_heads)
    dim = max((layer.k_dim for layer in shape.geometry.layers), default=dim) or dim
    per_token = 6 * shape.hidden + 3 * shape.inner + 2 * heads * dim
    width = max(half_bytes, shape.geometry.element_bytes)
    return int(per_token * chunk * width)


def score_bytes(shape: ModelShape, bits: int) -> int:
    """Bytes of attention scores per query and context token; 0: fused.

    `bits` is the KV precision: attention over quantized KV is never fused on a GPU.
    """
    if _is_fused(shape.geometry, bits):
        return 0
    return shape.n_heads * shape.geometry.element_bytes * SCORE_COPIES


def max_score_bytes(preset: Preset, working_set: int) -> int:
    """Limit in bytes of attention scores per prefill chunk.

    0 is an unknown working set.
    """
    if preset.hosts or not working_set:
        return MAX_SCORE_BYTES
    return min(MAX_SHARED_SCORE_BYTES, int(SCORE_SHARE * working_set))


def kv_bits(preset: Preset) -> int:
    """Precision of the KV of a full slot."""
    if preset.kv.quantized_start >= preset.slots.n_ctx:
        return PLAIN_BITS
    return preset.kv.bits


def workspace_of(
    shape: ModelShape,
    preset: Preset,
    half_bytes: int,
    working_set: int = 0,
    buffered_bytes: int = 0,
) -> int:
    """Bytes of a preset's service beside weights and KV.

    On a GPU, where half precision is not widened, with the peak of attention scores and with
    `buffered_bytes` that command buffers keep, which are not more than all layers make.
    """
    chunk = preset.prefill.chunk_size
    slots = preset.slots
    n_bytes = workspace_bytes(shape, chunk, slots.count, half_bytes)
    if half_bytes > 2:
        return n_bytes
    each_score = score_bytes(shape, kv_bits(preset))
    scores = min(max_score_bytes(preset, working_set), each_score * chunk * slots.n_ctx)
    all_layers = len(shape.geometry.layers) * (activation_bytes(shape, chunk, half_bytes) + scores)
    return n_bytes + scores + min(buffered_bytes, all_layers)


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
        if n_bytes <= larger.n_bytes:
            return larger
        return replace(self, pct=pct + 1)


class ServiceLoad(Struct, frozen=True):
    """Load of a service: weights and workspace in bytes, slots, context.

    `chunk` is the longest prefill chunk; windows are larger while it runs.
    `budget` bounds the KV of all slots; None is no bound but the memory itself. Each slot has a
    context of the draft model too; the weights are those of both models.
    """

    geometry: Geometry
    weights: int
    workspace: int = 0
    n_slots: int = 1
    n_ctx: int = 4096
    chunk: int = 512
    budget: Budget | None = None
    draft: Geometry = Geometry(())


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
        return self.weights + self.kv + self.workspace + self.margin


def need(load: ServiceLoad) -> MemoryNeed:
    """Peak bytes of this load: all slots full, one of them prefilling."""
    drafts = load.draft.state_bytes(load.n_ctx, load.chunk)
    settled = load.geometry.state_bytes(load.n_ctx, 1) + drafts
    in_prefill = load.geometry.state_bytes(load.n_ctx, load.chunk) + drafts
    full = sum(geometry.peak_full_bytes(load.n_ctx) for geometry in (load.geometry, load.draft))
    return MemoryNeed(
        weights=load.weights,
        kv_full=full * load.n_slots,
        kv_state=settled * (load.n_slots - 1) + in_prefill,
        workspace=load.workspace,
    )


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
    n_agents = _more([sizes.total for sizes in first], memory)
    if load.budget is None:
        return n_agents
    return min(n_agents, _more([sizes.kv for sizes in first], load.budget.n_bytes))


def _more(first: Sequence[int], bound: int) -> int:
    """Number that fits `bound` bytes; one, two and three take the `first`, others as the third."""
    single, two, three = first
    if two > bound or two == single:
        return int(single <= bound)
    if three > two:
        return 2 + (bound - two) // (three - two)
    return 2


def max_ctx(load: ServiceLoad, memory: int) -> int:
    """Most tokens per slot for `load.n_slots` slots, 0 if none; binary search."""
    low = 0
    high = 1 << 24
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
    return geometry.growth * n_tokens + states + n_files * HEADER_BYTES
