"""Prefill attention kernels of MLX on Metal: fused or not.

Source: `has_fused_kernel` and `use_fallback` in MLX's
`backend/metal/scaled_dot_product_attention.cpp`, and the kernel names in the Metal library of
the macOS wheel 0.32.4. Read both again at each upgrade of MLX.
"""

from msgspec import Struct

N_VECTOR = 8
"""Maximum queries of the vector kernel; more run the full kernel."""

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

MAX_SLOWDOWN = 1.25
"""Maximum seconds of a forced fused kernel against the unfused default.

The default computes long contexts in chunks of a few hundred tokens, which costs more.
"""


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


def can_force(dims: Dims, n_queries: int, *, is_causal: bool, is_half: bool, has_nax: bool) -> bool:
    """Whether `force_fused` changes the kernel of more than `N_VECTOR` queries, 16-bit KV.

    On a GPU with NAX the default one may be fused already. float32 is fused there too where TF32
    is enabled, which is not known here.
    """
    is_nax = has_nax and is_causal and is_half and dims == NAX_DIMS and n_queries >= NAX_QUERIES
    return dims in FORCIBLE_DIMS and not is_nax


def is_worth_forcing(default_s: float, forced_s: float) -> bool:
    """Whether the forced kernel is fast enough, by seconds of an attention."""
    return forced_s <= MAX_SLOWDOWN * default_s


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
