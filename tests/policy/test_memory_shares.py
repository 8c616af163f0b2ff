"""Division of memory between services: all bytes together stay within the ceiling."""

from random import Random

import pytest

from mlxstack.policy.memory.memory_shares import MemoryClaim, free_beside, granted, kv_budgets

CODER = MemoryClaim("coder", fixed=20, kv=10)
SECOND = MemoryClaim("second", fixed=5, kv=3)
FIXED = MemoryClaim("fixed", fixed=4, kv=2, share=6)
VECTORS = MemoryClaim("vectors", fixed=7, kv=0, share=0)


def test_a_service_alone_gets_all_that_is_left() -> None:
    assert kv_budgets([CODER], 100) == {"coder": 80}


def test_two_services_hold_their_slots_and_halve_the_rest() -> None:
    assert kv_budgets([CODER, SECOND], 100) == {"coder": 10 + 31, "second": 3 + 31}


def test_a_fixed_share_is_taken_first() -> None:
    assert kv_budgets([CODER, FIXED], 100) == {"fixed": 6, "coder": 70}


def test_slots_that_do_not_fit_get_less_in_proportion() -> None:
    assert kv_budgets([CODER, SECOND], 31) == {"coder": 4, "second": 1}


@pytest.mark.parametrize("seed", range(50))
def test_the_sum_never_exceeds_the_ceiling_and_does_not_depend_on_the_order(seed: int) -> None:
    random = Random(seed)
    claims = [
        MemoryClaim(
            str(n),
            fixed=random.randrange(40),
            kv=random.randrange(40),
            share=random.choice([None, None, 0, random.randrange(20)]),
        )
        for n in range(random.randrange(1, 6))
    ]
    given = sum(one.fixed + (one.share or 0) for one in claims)
    ceiling = given + random.randrange(200)
    budgets = kv_budgets(claims, ceiling)
    assert sum(one.fixed + budgets[one.name] for one in claims) <= ceiling
    assert kv_budgets(claims[::-1], ceiling) == budgets


@pytest.mark.parametrize("seed", range(50))
def test_services_that_come_and_go_in_any_order_never_exceed_the_ceiling(seed: int) -> None:
    random = Random(seed)
    all_claims = [
        MemoryClaim(str(n), random.randrange(1, 20), random.randrange(1, 20)) for n in range(5)
    ]
    ceiling = sum(one.least for one in all_claims) + random.randrange(200)
    running: dict[str, MemoryClaim] = {}
    grants: dict[str, int] = {}

    def renew(name: str) -> None:
        others = [one for one in running.values() if one.name != name]
        beside = running[name], others, grants, ceiling
        # A service loads once its slots have room.
        if name in grants or free_beside(*beside) >= running[name].kv:
            grants[name] = granted(*beside)

    for _ in range(200):
        one = random.choice(all_claims)
        if one.name not in running:
            running[one.name] = one
        elif random.random() < 0.2:
            del running[one.name]
            grants.pop(one.name, None)
        else:
            renew(one.name)
        assert sum(running[name].fixed + kv for name, kv in grants.items()) <= ceiling
    for _ in range(3):
        for name in running:
            renew(name)
    assert grants == kv_budgets(tuple(running.values()), ceiling)
