"""Where a common prefix is split, and from which length on sharing pays."""

from hypothesis import given
from hypothesis import strategies as st

from mlxstack.policy.live_sharing import (
    MIN_TOKENS,
    NO_SHARING,
    LiveSharing,
    SharingCosts,
    least_shared,
)

N = st.integers(0, 10_000)


def test_a_split_point_is_the_last_block_boundary_of_a_prefix_that_is_long_enough() -> None:
    sharing = LiveSharing(block_size=128, min_tokens=1024)
    assert [sharing.split_point(n) for n in (0, 1023, 1024, 1151, 1152)] == [0, 0, 1024, 1024, 1152]
    assert NO_SHARING.split_point(1 << 20) == 0


def test_a_longer_prefix_is_worth_a_second_copy_from_twice_the_length_on() -> None:
    sharing = LiveSharing(block_size=128, min_tokens=1024)
    assert sharing.extended(0, 2000) == 1920
    assert sharing.extended(1024, 2000) == 1024
    assert sharing.extended(1024, 2048) == 2048
    assert sharing.extended(4096, 2000) == 1920
    assert sharing.extended(4096, 1000) == 0


@given(n_shared=N, n_common=N, least=st.integers(1, 2000), block=st.sampled_from([16, 128]))
def test_no_more_is_shared_than_is_common(
    n_shared: int, n_common: int, least: int, block: int
) -> None:
    sharing = LiveSharing(block, least)
    n_tokens = sharing.extended(n_shared - n_shared % block, n_common)
    assert n_tokens <= n_common
    assert n_tokens % block == 0


def test_the_measured_curve_decides() -> None:
    def curve(*together: float) -> list[SharingCosts]:
        return [SharingCosts(1024 << i, 1.0, one) for i, one in enumerate(together)]

    assert least_shared(curve(1.2, 0.9, 0.8)) == 2048
    assert least_shared(curve(0.9, 1.1, 0.8)) == 4096
    assert least_shared(curve(0.9, 0.9, 1.1)) is None
    assert least_shared(curve(0.9, 0.9)) == MIN_TOKENS
    assert least_shared([SharingCosts(256, 1.0, 0.5)]) == MIN_TOKENS
    assert least_shared([]) is None
