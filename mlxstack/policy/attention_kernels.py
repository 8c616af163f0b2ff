"""Prefill attention kernels of MLX on Metal: fused or not.

Source: `has_fused_kernel` and `use_fallback` in MLX's
`backend/metal/scaled_dot_product_attention.cpp`, and the kernel names in the Metal library of
the macOS wheel 0.32.4. Read both again at each upgrade of MLX.
"""

from msgspec import Struct
from msgspec.structs import replace

Dims = tuple[int, int]
"""Head dims of keys and values."""

FULL_DIMS: frozenset[Dims] = frozenset(
    {(64, 64), (72, 72), (80, 80), (96, 64), (96, 96), (128, 128)}
)
FORCIBLE_DIMS: frozenset[Dims] = frozenset({(192, 192), (256, 256)})
"""Dims with a full kernel that runs with `force_fused` only."""

NAX_DIMS: Dims = (256, 256)
NAX_QUERIES = 1024
"""Minimum queries of the fused kernel of NAX_DIMS on a GPU with NAX."""

NAX_MACOS = (26, 2)

MIN_FORCED = 32
"""Minimum queries that a kernel is forced for: more than any draft has.

A pass of drafts serves several rows, which could not all begin again where the kernel fails.
"""

MAX_SLOWDOWN = 1.25
"""Maximum seconds of a forced fused kernel against the unfused default.

The default computes long contexts in chunks of a few hundred tokens, which costs more.
"""


class PrefillAttention(Struct, frozen=True):
    """Storage of attention scores in prefill, by chunk size.

    `score_bytes` are stored per query and context token in chunks below `fused_from` tokens;
    0 of `fused_from`: in all chunks. With `is_forced` none are stored while forced kernels run.
    `max_score_bytes` may be alive.
    """

    score_bytes: int = 0
    fused_from: int = 0
    is_forced: bool = False
    max_score_bytes: int = 0


FUSED = PrefillAttention()


def has_nax(architecture: str, macos: tuple[int, ...]) -> bool:
    """Whether MLX uses the matrix units of M5 and later, by `device_info`.

    An architecture is `applegpu_g17s`: generation and size. Source: `is_nax_available` in MLX's
    `backend/metal/device.cpp`.
    """
    digits = "".join(c for c in architecture.rpartition("_")[2] if c.isdigit())
    first = 18 if architecture.endswith("p") else 17
    return bool(digits) and int(digits) >= first and macos >= NAX_MACOS


def can_force(dims: Dims, n_queries: int, *, is_causal: bool, is_half: bool, has_nax: bool) -> bool:
    """Whether to try `force_fused` for so many queries over 16-bit KV.

    In float32 the kernel of 256 takes more threadgroup memory than some GPUs have
    (https://github.com/jundot/omlx/issues/3795). With NAX the default kernel may be fused already.
    """
    is_nax = has_nax and is_causal and dims == NAX_DIMS and n_queries >= NAX_QUERIES
    return dims in FORCIBLE_DIMS and is_half and n_queries >= MIN_FORCED and not is_nax


def is_worth_forcing(default_s: float, forced_s: float) -> bool:
    """Whether the forced kernel is fast enough, by seconds of an attention."""
    return forced_s <= MAX_SLOWDOWN * default_s


def prefill_attention(
    planned: PrefillAttention, full_dims: frozenset[Dims], forced: frozenset[Dims], *, has_nax: bool
) -> PrefillAttention:
    """Scores that full-attention layers of these dims store in prefill chunks.

    `planned` are those of unfused layers; `forced` are the dims whose fused kernel is forced.
    """
    unfused = full_dims - FULL_DIMS
    if not unfused:
        return FUSED
    is_fused_later = has_nax and unfused == {NAX_DIMS}
    fused_from = NAX_QUERIES if is_fused_later else 0
    return replace(planned, fused_from=fused_from, is_forced=unfused <= forced)
