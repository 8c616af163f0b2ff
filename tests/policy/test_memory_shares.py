"""Division of memory between services: all bytes together stay within the ceiling."""

from random import Random

import pytest

from mlxstack.policy.memory.memory_shares import MemoryClaim, kv_budgets

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
