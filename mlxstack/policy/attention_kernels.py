"""Attention kernels of MLX on Metal: fused or not.

Source: `has_fused_kernel` and `use_fallback` in MLX's
`backend/metal/scaled_dot_product_attention.cpp`, and the kernel names in the Metal library of
the macOS wheel 0.32.4. Read both again at each upgrade of MLX.
"""

from enum import StrEnum

from msgspec import Struct

N_VECTOR = 8
"""Maximum queries of the vector kernel; more run the full kernel."""

MAX_VECTOR_ROWS = 32
"""Maximum queries times query heads per KV head of the vector kernel."""

Dims = tuple[int, int]
"""Head dims of keys and values."""

VECTOR_DIMS: frozenset[Dims] = frozenset(
    {(64, 64), (96, 64), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512)}
)
FULL_DIMS: frozenset[Dims] = frozenset(
    {(64, 64), (72, 72), (80, 80), (96, 64), (96, 96), (128, 128)}
)
FORCIBLE_DIMS: frozenset[Dims] = frozenset({(192, 192), (256, 256)})
"""Dims with a full kernel that runs with `force_fused` only."""

NAX_DIMS: Dims = (256, 256)
NAX_QUERIES = 1024
"""Minimum queries of the fused kernel of NAX_DIMS on a GPU with NAX."""

NAX_MACOS = (26, 2)

MAX_SLOWDOWN = 1.25
"""Maximum seconds of a forced fused kernel against the unfused default.

The default computes long contexts in chunks of a few hundred tokens, which costs more.
"""


class MaskKind(StrEnum):
    """Mask argument of the attention function."""

    NONE = "none"
    CAUSAL = "causal"
    ARRAY = "array"


class AttentionCall(Struct, frozen=True):
    """Arguments of an attention call over unquantized KV that select its kernel.

    `n_grouped` is the number of query heads per KV head.
    """

    dims: Dims
    n_queries: int
    mask: MaskKind = MaskKind.CAUSAL
    is_half: bool = True
    n_grouped: int = 1


class KernelCosts(Struct, frozen=True):
    """Seconds of one prefill attention: default kernel and forced one."""

    default_s: float
    forced_s: float


class PrefillAttention(Struct, frozen=True):
    """Storage of attention scores in prefill, by chunk size.

    `score_bytes` are stored per query and context token in chunks below `fused_from` tokens;
    0 of `fused_from`: in all chunks.
    """

    score_bytes: int = 0
    fused_from: int = 0


FUSED = PrefillAttention()


def has_nax(architecture: str, macos: tuple[int, ...]) -> bool:
    """Whether MLX uses the matrix units of M5 and later, by `device_info`.

    An architecture is `applegpu_g17s`: generation and size. Source: `is_nax_available` in MLX's
    `backend/metal/device.cpp`.
    """
    digits = "".join(c for c in architecture.rpartition("_")[2] if c.isdigit())
    first = 18 if architecture.endswith("p") else 17
    return bool(digits) and int(digits) >= first and macos >= NAX_MACOS


def is_fused(call: AttentionCall, *, has_nax: bool) -> bool:
    """Whether the default kernel of a call stores no scores."""
    if call.n_queries <= N_VECTOR:
        has_mask = call.mask is MaskKind.ARRAY and call.dims == (512, 512)
        n_rows = call.n_queries * call.n_grouped
        return call.dims in VECTOR_DIMS and n_rows <= MAX_VECTOR_ROWS and not has_mask
    if call.dims in FULL_DIMS:
        return True
    # float32 is fused there too where TF32 is enabled, which this table does not know.
    is_nax = has_nax and call.is_half and call.dims == NAX_DIMS
    return is_nax and call.mask is MaskKind.CAUSAL and call.n_queries >= NAX_QUERIES


def can_force(call: AttentionCall, *, has_nax: bool) -> bool:
    """Whether `force_fused` changes the kernel of a call."""
    is_full = call.n_queries > N_VECTOR and call.dims in FORCIBLE_DIMS
    return is_full and not is_fused(call, has_nax=has_nax)


def is_worth_forcing(costs: KernelCosts) -> bool:
    """Whether the forced kernel is fast enough."""
    return costs.forced_s <= MAX_SLOWDOWN * costs.default_s


def prefill_attention(
    score_bytes: int, full_dims: frozenset[Dims], forced: frozenset[Dims], *, has_nax: bool
) -> PrefillAttention:
    """Scores that full-attention layers of these dims store in prefill chunks.

    `score_bytes` is per query and context token of an unfused layer; `forced` are the dims whose
    fused kernel is forced.
    """
    left = full_dims - forced - FULL_DIMS
    if not left:
        return FUSED
    is_fused_later = has_nax and left == {NAX_DIMS}
    return PrefillAttention(score_bytes, NAX_QUERIES if is_fused_later else 0)
