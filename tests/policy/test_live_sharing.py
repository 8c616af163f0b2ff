"""Where a common prefix is split, and from which length on sharing pays."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from mlxstack.policy.kv.shared_prefixes import (
    MIN_TOKENS,
    NO_SHARING,
    LiveSharing,
    PrefixUse,
    SharingCosts,
    least_shared,
    saved_bytes,
)
from mlxstack.policy.scheduling.scheduler import AssignSlot, SchedulerLimits, schedule
from mlxstack.policy.scheduling.scheduler_state import (
    QueuedRequest,
    enqueue,
    initial_state,
    release_slot,
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


class Held(Struct, frozen=True):
    """A request: its prefix out of three, tokens of it that it holds, its own tokens."""

    prefix: int
    n_shared: int
    n_own: int


HELD = st.builds(Held, st.integers(0, 2), st.integers(0, 1000), st.integers(1, 1000))


@given(requests=st.lists(HELD, min_size=1, max_size=12), budget=st.integers(500, 6000))
def test_admission_with_shared_prefixes_never_exceeds_the_budget(
    requests: list[Held], budget: int
) -> None:
    """A prefix has room for 1,100 tokens of a byte, and stays as long as a request holds it."""
    size, active = 1100, dict[str, Held]()
    known = {f"ask {i}": one for i, one in enumerate(requests)}

    def uses(held: list[Held]) -> list[PrefixUse]:
        return [PrefixUse(one.prefix, one.n_shared, size) for one in held if one.n_shared]

    def saved(request: str, _slot: int) -> int:
        return saved_bytes(uses([*active.values(), known[request]]))

    state, limits = initial_state(4), SchedulerLimits(max_bytes=budget)
    for name, one in known.items():
        queued = QueuedRequest(name, 10, 0.0, n_bytes=one.n_own + one.n_shared)
        state = enqueue(state, queued)
    while state.waiting or active:
        state, actions = schedule(state, 0.0, limits, lambda _ask, _slot: 0, saved=saved)
        for action in actions:
            assert isinstance(action, AssignSlot)
            active[action.queued.request] = known[action.queued.request]
        held = list(active.values())
        prefixes = {one.prefix for one in held if one.n_shared}
        n_bytes = sum(one.n_own for one in held) + size * len(prefixes)
        assert n_bytes <= budget or len(held) == 1
        if not actions:
            done = min(active)
            slot = state.find(done)
            assert slot is not None
            state = release_slot(state, slot.id, 0, 0.0)
            del active[done]


def test_four_requests_on_one_prefix_fit_where_two_and_a_half_copies_do() -> None:
    uses = [PrefixUse(1, 900, 1024)] * 4
    assert saved_bytes(uses) == 3600 - 1024
    assert saved_bytes(uses[:1]) == 900 - 1024
    assert saved_bytes([*uses, PrefixUse(2, 50, 50)]) == saved_bytes(uses)
    assert saved_bytes([]) == 0
