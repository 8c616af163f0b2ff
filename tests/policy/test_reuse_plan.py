"""The restore planner against its definition, and the reason of every miss."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.engine_events import CacheMiss, KVSource
from mlxstack.core.image import ImageSize
from mlxstack.core.prompt_tokens import ImageSpan
from mlxstack.policy.kv.prefix_index import PathStep, PrefixMatch, RestorePoint
from mlxstack.policy.kv.reuse_plan import (
    COST,
    MissContext,
    MissReason,
    ReusePlan,
    ReuseSource,
    explain_miss,
    plan,
    stored,
)


def window(n_common: int, *states: RestorePoint) -> ReuseSource:
    """A live context in slot 0 that exists in these states only."""
    return ReuseSource(KVSource.SLOT, n_common, free_from=None, states=states, slot=0)


options_lists = st.lists(
    st.builds(
        ReuseSource,
        source=st.sampled_from([KVSource.SLOT, KVSource.FORK, KVSource.PARKED, KVSource.DISK]),
        covered=st.integers(0, 30),
        free_from=st.none() | st.integers(0, 30),
        states=st.lists(st.builds(RestorePoint, st.integers(0, 30)), max_size=4).map(tuple),
    ),
    max_size=5,
)


def reachable(option: ReuseSource, n_prompt: int) -> set[int]:
    """All positions an option can restore, by the definition."""
    free = set() if option.free_from is None else set(range(option.free_from, option.covered + 1))
    states = {state.position for state in option.states if state.position <= option.covered}
    return {p for p in free | states if 0 < p < n_prompt}


@given(n_prompt=st.integers(0, 32), options=options_lists)
def test_the_longest_reachable_position_wins_and_ties_go_to_the_cheapest(
    n_prompt: int, options: list[ReuseSource]
) -> None:
    made = plan(n_prompt, options)
    best = max((p for o in options for p in reachable(o, n_prompt)), default=0)
    assert made.position == best
    able = [o.source for o in options if best in reachable(o, n_prompt)]
    assert made.source == min(able, key=COST.__getitem__, default=KVSource.NONE)


@given(
    n_prompt=st.integers(0, 32),
    options=options_lists,
    ends=st.lists(st.integers(0, 32), max_size=6, unique=True).map(sorted),
)
def test_no_plan_ends_inside_an_image_and_the_longest_other_one_wins(
    n_prompt: int, options: list[ReuseSource], ends: list[int]
) -> None:
    size = ImageSize(32, 32, 1, 1)
    pairs = zip(ends[::2], ends[1::2], strict=False)
    images = [ImageSpan(start, end, b"", size) for start, end in pairs]
    inside = {p for image in images for p in range(image.start + 1, image.end)}
    made = plan(n_prompt, options, images)
    best = max((p for o in options for p in reachable(o, n_prompt) - inside), default=0)
    # The start of an image stands for the positions inside it.
    assert made.position == best


@given(n_prompt=st.integers(1, 32), options=options_lists)
def test_at_least_one_token_is_left_to_compute(n_prompt: int, options: list[ReuseSource]) -> None:
    assert plan(n_prompt, options).position <= n_prompt - 1


def test_an_exact_hit_of_the_whole_prompt_leaves_its_last_token() -> None:
    made = plan(100, [ReuseSource(KVSource.SLOT, 100, slot=2)])
    assert (made.position, made.slot) == (99, 2)


def test_c4_a_wrapped_window_goes_on_only_from_where_it_stands() -> None:
    standing = window(200, RestorePoint(200))
    assert plan(300, [standing]) == ReusePlan(KVSource.SLOT, 200, slot=0)
    behind = window(190, RestorePoint(200), RestorePoint(150, "c"))
    assert plan(300, [behind]) == ReusePlan(KVSource.SLOT, 150, slot=0, checkpoint="c")


def test_a_window_that_has_not_wrapped_can_still_be_trimmed() -> None:
    assert plan(300, [ReuseSource(KVSource.SLOT, 40, free_from=0)]).position == 40
    assert plan(300, [ReuseSource(KVSource.SLOT, 40, free_from=41)]).position == 0


PATH = (
    PathStep("a", 0, 100, 10, True),
    PathStep("b", 100, 180, 8, True),
    PathStep("c", 180, 256, 7, False),
)


def test_stored_offers_memory_alone_and_memory_with_disk() -> None:
    match = PrefixMatch(256, PATH, (RestorePoint(90, "x"), RestorePoint(170, "y", is_parked=False)))
    parked, disk = stored(match, is_sliceable=True)
    assert (parked.covered, disk.covered) == (180, 256)
    assert plan(150, [parked, disk]).source is KVSource.PARKED
    made = plan(999, [parked, disk])
    assert (made.source, made.position, made.path) == (KVSource.DISK, 256, PATH)


def test_d20_checkpoints_decide_where_layers_cannot_be_cut() -> None:
    match = PrefixMatch(256, PATH, (RestorePoint(90, "x"), RestorePoint(170, "y", is_parked=False)))
    parked, disk = stored(match, is_sliceable=False)
    assert plan(999, [parked]).checkpoint == "x"
    made = plan(999, [parked, disk])
    assert (made.source, made.position, made.checkpoint) == (KVSource.DISK, 170, "y")
    assert made.path == (PATH[0], PathStep("b", 100, 170, 8, True))
    assert plan(100, [parked, disk]).source is KVSource.PARKED


def test_nothing_known_is_a_cold_start() -> None:
    assert plan(10, stored(PrefixMatch(), True)) == ReusePlan()


SLOT = ReuseSource(KVSource.SLOT, 500, slot=0)
WINDOW = window(500, RestorePoint(400, "c"))


@pytest.mark.parametrize(
    ("options", "clues", "miss"),
    [
        ([], MissContext(1000), CacheMiss(MissReason.COLD)),
        ([], MissContext(1000, is_enabled=False), CacheMiss(MissReason.DISABLED)),
        ([], MissContext(1000, is_foreign=True), CacheMiss(MissReason.MODEL)),
        ([SLOT], MissContext(1000, n_previous=500, n_common=500), None),
        ([SLOT], MissContext(501, n_previous=500, n_common=500), None),
        ([SLOT], MissContext(400, n_previous=500, n_common=400), None),
        (
            [SLOT],
            MissContext(1000, n_previous=800, n_common=500),
            CacheMiss(MissReason.DIVERGED, 500, n_lost=300),
        ),
        (
            [],
            MissContext(1000, n_previous=800, n_common=3),
            CacheMiss(MissReason.DIVERGED, 3, n_lost=800),
        ),
        (
            [SLOT],
            MissContext(1000, is_new=True, n_previous=800, n_common=500),
            CacheMiss(MissReason.NEW, 500),
        ),
        ([SLOT], MissContext(1000, n_previous=400, n_common=3), None),
        ([SLOT], MissContext(1000, n_previous=800, n_common=12, is_guess=True), None),
        (
            [SLOT],
            MissContext(1000, n_previous=800, n_common=12),
            CacheMiss(MissReason.DIVERGED, 12, n_lost=300),
        ),
        (
            [SLOT],
            MissContext(1000, n_previous=800, n_common=500, is_guess=True),
            CacheMiss(MissReason.DIVERGED, 500, n_lost=300),
        ),
        (
            [],
            MissContext(1000, is_new=True, n_previous=800, n_common=3),
            CacheMiss(MissReason.COLD),
        ),
        (
            [WINDOW],
            MissContext(1000, n_previous=500, n_common=500),
            CacheMiss(MissReason.NO_CHECKPOINT, 400, n_lost=100),
        ),
        (
            [WINDOW],
            MissContext(1000, n_previous=520, n_common=500),
            CacheMiss(MissReason.NO_CHECKPOINT, 400, n_lost=100),
        ),
        (
            [WINDOW],
            MissContext(1000, n_previous=900, n_common=500),
            CacheMiss(MissReason.DIVERGED, 500, n_lost=500),
        ),
        ([], MissContext(1000, n_evicted=512), CacheMiss(MissReason.EVICTED, 0, n_lost=512)),
        ([SLOT], MissContext(1000, n_evicted=640), CacheMiss(MissReason.EVICTED, 500, n_lost=140)),
        (
            [],
            MissContext(1000, n_previous=700, n_common=700),
            CacheMiss(MissReason.EVICTED, 0, n_lost=700),
        ),
        (
            [],
            MissContext(1000, n_previous=702, n_common=700),
            CacheMiss(MissReason.EVICTED, 0, n_lost=700),
        ),
        ([SLOT], MissContext(1000, n_previous=530, n_common=530), None),
    ],
)
def test_d16_every_reason(
    options: list[ReuseSource], clues: MissContext, miss: CacheMiss | None
) -> None:
    assert explain_miss(plan(clues.n_prompt, options), options, clues) == miss


@given(n_prompt=st.integers(1, 32), options=options_lists)
def test_d16_the_most_that_was_possible_is_no_miss(
    n_prompt: int, options: list[ReuseSource]
) -> None:
    made = plan(n_prompt, options)
    covered = min(max((o.covered for o in options), default=0), n_prompt - 1)
    clues = MissContext(n_prompt, n_previous=covered, n_common=covered)
    miss = explain_miss(made, options, clues)
    assert (miss is None) == (made.position == covered > 0)


@given(
    n_prompt=st.integers(1, 32),
    options=options_lists,
    n_tokens=st.tuples(*[st.integers(0, 40)] * 3),
    is_so=st.tuples(*[st.booleans()] * 4),
)
def test_d16_no_more_is_lost_than_is_computed(
    n_prompt: int,
    options: list[ReuseSource],
    n_tokens: tuple[int, int, int],
    is_so: tuple[bool, bool, bool, bool],
) -> None:
    n_previous, n_common, n_evicted = n_tokens
    is_enabled, is_foreign, is_new, is_guess = is_so
    clues = MissContext(
        n_prompt,
        is_enabled=is_enabled,
        is_foreign=is_foreign,
        is_new=is_new,
        n_previous=n_previous,
        n_common=n_common,
        is_guess=is_guess,
        n_evicted=n_evicted,
    )
    made = plan(n_prompt, options if is_enabled else ())
    miss = explain_miss(made, options if is_enabled else (), clues)
    assert miss is None or 0 <= miss.n_lost <= n_prompt - made.position
