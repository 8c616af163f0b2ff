"""Residency of models: budget, linger, order, no model in mid-request."""

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxstack.core.preset import Residency
from mlxstack.policy.residency import MemberView, residency_step

BUDGET = 10
LINGER = 5.0


def member(name: str, n_bytes: int = 6, **known: object) -> MemberView:
    return MemberView(name, n_bytes, **known)  # type: ignore[arg-type]


def loaded(name: str, n_bytes: int = 6, **known: object) -> MemberView:
    return member(name, n_bytes, is_loaded=True, **known)


def test_room_is_taken_at_once() -> None:
    step = residency_step([loaded("a", 4), member("b", waiting_since=9)], BUDGET, LINGER, 9)
    assert (step.load, step.unload, step.closed) == (("b",), (), frozenset())


def test_the_least_recently_used_leaves() -> None:
    members = [
        loaded("a", 5, used_at=3), loaded("b", 5, used_at=2), member("c", 5, waiting_since=9),
    ]  # fmt: skip
    step = residency_step(members, BUDGET, LINGER, 9)
    assert (step.load, step.unload, step.closed) == ((), ("b",), frozenset({"b"}))


def test_a_busy_member_is_closed_and_stays_until_its_requests_end() -> None:
    members = [loaded("a", n_active=1), member("b", waiting_since=9)]
    step = residency_step(members, BUDGET, LINGER, 9)
    assert (step.unload, step.closed) == ((), frozenset({"a"}))


def test_a_member_stays_for_its_linger() -> None:
    members = [loaded("a", loaded_at=7), member("b", waiting_since=9)]
    early = residency_step(members, BUDGET, LINGER, 9)
    assert (early.unload, early.closed, early.look_at) == ((), frozenset(), 12)
    assert residency_step(members, BUDGET, LINGER, 12).unload == ("a",)


def test_what_always_stays_never_leaves_and_what_never_stays_leaves_first() -> None:
    members = [
        loaded("a", 4, residency=Residency.ALWAYS),
        loaded("b", 3, used_at=1),
        loaded("c", 3, used_at=4, residency=Residency.NEVER),
        member("d", 3, waiting_since=8),
    ]
    assert residency_step(members, BUDGET, LINGER, 8).unload == ("c",)
    alone = residency_step(members[:3], BUDGET, LINGER, 8)
    assert (alone.unload, alone.look_at) == ((), 9)
    assert residency_step(members[:3], BUDGET, LINGER, 9).unload == ("c",)


def test_a_small_one_goes_ahead_only_where_the_first_does_not_wait_longer() -> None:
    big = member("big", 7, waiting_since=1)
    small = member("small", 2, waiting_since=2)
    busy = loaded("a", 6, n_active=1)
    assert residency_step([busy, big, small], BUDGET, LINGER, 9).load == ("small",)
    larger = replace(small, n_bytes=4)
    assert residency_step([busy, big, larger], BUDGET, LINGER, 9).load == ()


def test_members_over_the_budget_leave() -> None:
    members = [loaded("a", 6, used_at=2), loaded("b", 6, used_at=1)]
    assert residency_step(members, BUDGET, LINGER, 9).unload == ("b",)


class House:
    """Members as a gateway runs them, on a clock of the test."""

    def __init__(self, sizes: list[int], residencies: list[Residency]) -> None:
        self.members = {
            str(i): MemberView(str(i), size, residency)
            for i, (size, residency) in enumerate(zip(sizes, residencies, strict=True))
        }
        self.waiting: dict[str, list[float]] = {name: [] for name in self.members}
        self.ends: dict[str, list[float]] = {name: [] for name in self.members}
        self.closed: frozenset[str] = frozenset()
        self.leaving: set[str] = set()
        self.waits: list[float] = []
        self.n_unloads: dict[str, int] = dict.fromkeys(self.members, 0)

    def ask(self, name: str, now: float, length: float) -> None:
        if self.members[name].is_loaded and name not in self.closed | self.leaving:
            self.ends[name].append(now + length)
        else:
            self.waiting[name].append(now)

    def turn(self, now: float, length: float) -> None:
        for name in self.members:
            self.ends[name] = [end for end in self.ends[name] if end > now]
        gone = self.leaving
        self.leaving = set()
        for name in gone:
            self.members[name] = replace(self.members[name], is_loaded=False)
        self.members = {
            name: replace(
                one,
                n_active=len(self.ends[name]),
                used_at=now if self.ends[name] else one.used_at,
                waiting_since=min(self.waiting[name], default=None),
            )
            for name, one in self.members.items()
        }
        step = residency_step(list(self.members.values()), BUDGET, LINGER, now)
        self.closed = step.closed
        for name in step.unload:
            one = self.members[name]
            assert not one.n_active and one.residency is not Residency.ALWAYS
            assert one.loaded_at + LINGER <= now
            self.leaving.add(name)
            self.n_unloads[name] += 1
        for name in step.load:
            self.members[name] = replace(
                self.members[name], is_loaded=True, loaded_at=now, used_at=now
            )
        assert sum(one.n_bytes for one in self.members.values() if one.is_loaded) <= BUDGET
        for name, one in self.members.items():
            if one.is_loaded and name not in self.closed | self.leaving:
                self.waits += [now - since for since in self.waiting[name]]
                self.ends[name] += [now + length for _ in self.waiting[name]]
                self.waiting[name] = []


@settings(max_examples=150)
@given(
    sizes=st.lists(st.integers(1, 7), min_size=2, max_size=4),
    kinds=st.lists(st.sampled_from([Residency.AUTO, Residency.NEVER]), min_size=4, max_size=4),
    asked=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=60),
    length=st.integers(1, 4),
)
def test_every_request_gets_its_model_and_swaps_are_bounded(
    sizes: list[int], kinds: list[Residency], asked: list[tuple[int, int]], length: int
) -> None:
    house = House(sizes, kinds[: len(sizes)])
    end = 40 + len(sizes) * 4 * (int(LINGER) + length + 2)
    for now in range(end):
        for which, at in asked:
            if at == now:
                house.ask(str(which % len(sizes)), float(now), float(length))
        house.turn(float(now), float(length))
    assert not any(house.waiting.values())
    assert all(n <= end / LINGER + 1 for n in house.n_unloads.values())
    # One round over all members: each is loaded, lingers, finishes and leaves.
    assert max(house.waits, default=0) <= len(sizes) * (LINGER + length + 2)
