"""Fused or not: the table of MLX's attention kernels on Metal."""

import pytest

from mlxstack.policy.attention_kernels import (
    FORCIBLE_DIMS,
    FULL_DIMS,
    AttentionCall,
    KernelCosts,
    MaskKind,
    PrefillAttention,
    can_force,
    has_nax,
    is_fused,
    is_worth_forcing,
    prefill_attention,
)

D256, D128, LATENT = (256, 256), (128, 128), (512, 64)


@pytest.mark.parametrize("dims", [(64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (96, 64)])
@pytest.mark.parametrize("mask", MaskKind)
def test_prefill_of_usual_head_dims_is_fused_with_any_mask(
    dims: tuple[int, int], mask: MaskKind
) -> None:
    assert is_fused(AttentionCall(dims, 512, mask), has_nax=False)
    assert not can_force(AttentionCall(dims, 512, mask), has_nax=False)


@pytest.mark.parametrize("dims", [(192, 192), D256, (192, 128), (512, 512), LATENT, (64, 128)])
def test_prefill_of_other_head_dims_is_not(dims: tuple[int, int]) -> None:
    assert not is_fused(AttentionCall(dims, 2048), has_nax=False)
    assert can_force(AttentionCall(dims, 2048), has_nax=False) == (dims in FORCIBLE_DIMS)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (AttentionCall(D256, 1024), True),
        (AttentionCall(D256, 1023), False),
        (AttentionCall(D256, 2048, MaskKind.ARRAY), False),
        (AttentionCall(D256, 2048, MaskKind.NONE), False),
        (AttentionCall(D256, 2048, is_half=False), False),
        (AttentionCall((192, 192), 2048), False),
    ],
)
def test_an_m5_fuses_256_from_1024_causal_queries_on(call: AttentionCall, expected: bool) -> None:
    assert is_fused(call, has_nax=True) == expected
    assert can_force(call, has_nax=True) != expected


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (AttentionCall(D256, 1, MaskKind.NONE), True),
        (AttentionCall((96, 64), 1, MaskKind.NONE), True),
        (AttentionCall((192, 192), 1, MaskKind.NONE), False),
        (AttentionCall((80, 80), 1, MaskKind.NONE), False),
        (AttentionCall(D128, 4, n_grouped=8), True),
        (AttentionCall(D128, 5, n_grouped=8), False),
        (AttentionCall((512, 512), 1, MaskKind.NONE), True),
        (AttentionCall((512, 512), 1, MaskKind.ARRAY), False),
    ],
)
def test_decoding_has_a_vector_kernel_of_its_own_dims(call: AttentionCall, expected: bool) -> None:
    assert is_fused(call, has_nax=False) == expected
    assert not can_force(call, has_nax=False)


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
    assert is_worth_forcing(KernelCosts(0.1, 0.12))
    assert not is_worth_forcing(KernelCosts(0.1, 0.13))


def test_the_bound_on_scores_is_for_unfused_layers_only() -> None:
    none: frozenset[tuple[int, int]] = frozenset()
    wide, mixed = frozenset({D256}), frozenset({D256, (512, 512)})
    unfused = PrefillAttention(64)
    assert prefill_attention(64, FULL_DIMS, none, has_nax=False) == PrefillAttention()
    assert prefill_attention(64, wide, none, has_nax=False) == unfused
    assert prefill_attention(64, wide, wide, has_nax=False) == PrefillAttention()
    assert prefill_attention(64, wide, none, has_nax=True) == PrefillAttention(64, 1024)
    assert prefill_attention(64, mixed, wide, has_nax=True) == unfused
    assert prefill_attention(64, frozenset({LATENT}), none, has_nax=True) == unfused
