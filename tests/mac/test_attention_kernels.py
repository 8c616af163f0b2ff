"""Fused or not: the table of MLX's attention kernels on Metal."""

import pytest
from msgspec.structs import replace

from mlxstack.policy.attention_kernels import (
    FULL_DIMS,
    PrefillAttention,
    can_force,
    has_nax,
    is_worth_forcing,
    prefill_attention,
)

D256 = (256, 256)
LATENT = (512, 64)


@pytest.mark.parametrize("dims", [*FULL_DIMS, (192, 192), D256, (192, 128), (512, 512), LATENT])
def test_some_head_dims_have_a_kernel_that_runs_by_force_only(dims: tuple[int, int]) -> None:
    is_forcible = can_force(dims, 2048, is_causal=True, is_half=True, has_nax=False)
    assert is_forcible == (dims in ((192, 192), D256))


@pytest.mark.parametrize(
    ("dims", "n_queries", "is_causal", "is_half", "expected"),
    [
        (D256, 1024, True, True, False),
        (D256, 1023, True, True, True),
        (D256, 2048, False, True, True),
        (D256, 2048, True, False, False),
        (D256, 31, True, True, False),
        ((192, 192), 2048, True, True, True),
    ],
)
def test_an_m5_fuses_256_from_1024_causal_queries_on(
    dims: tuple[int, int], n_queries: int, is_causal: bool, is_half: bool, expected: bool
) -> None:
    is_fused = can_force(dims, n_queries, is_causal=is_causal, is_half=is_half, has_nax=True)
    assert is_fused == expected


@pytest.mark.parametrize(
    ("architecture", "macos", "expected"),
    [
        ("applegpu_g13g", (26, 3), False),
        ("applegpu_g16s", (26, 3), False),
        ("applegpu_g17s", (26, 3), True),
        ("applegpu_g17s", (26, 1), False),
        ("applegpu_g17s", (27,), True),
        ("applegpu_g17p", (26, 3), False),
        ("applegpu_g18p", (26, 3), True),
        ("", (), False),
        ("sm_90", (), False),
    ],
)
def test_the_matrix_units_of_a_gpu_are_told_by_architecture_and_macos(
    architecture: str, macos: tuple[int, ...], expected: bool
) -> None:
    assert has_nax(architecture, macos) == expected


def test_a_forced_kernel_may_be_a_quarter_slower() -> None:
    assert is_worth_forcing(0.1, 0.12)
    assert not is_worth_forcing(0.1, 0.13)


def test_the_bound_on_scores_is_for_unfused_layers_only() -> None:
    none: frozenset[tuple[int, int]] = frozenset()
    wide = frozenset({D256})
    mixed = frozenset({D256, (512, 512)})
    unfused = PrefillAttention(64, max_score_bytes=2**30)
    assert prefill_attention(unfused, FULL_DIMS, none, has_nax=False) == PrefillAttention()
    assert prefill_attention(unfused, wide, none, has_nax=False) == unfused
    forced = prefill_attention(unfused, wide, wide, has_nax=False)
    assert forced == replace(unfused, is_forced=True)
    later = prefill_attention(unfused, wide, none, has_nax=True)
    assert later == replace(unfused, fused_from=1024)
    assert prefill_attention(unfused, mixed, wide, has_nax=True) == unfused
    assert prefill_attention(unfused, frozenset({LATENT}), none, has_nax=True) == unfused
