"""What is proposed when something does not fit, and which model is preferred."""

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxstack.policy.memory.capacity import (
    Budget,
    Geometry,
    Layer,
    LayerKind,
    ServiceLoad,
    fits,
    max_agents,
    max_ctx,
    need,
    quantized,
)
from mlxstack.policy.memory.capacity_advice import (
    CapacityOption,
    CapacityRequest,
    FitLevel,
    advise,
    nearest,
    precisions,
)

GIB = 2**30
FULL = Layer(LayerKind.FULL, 8, 128, 8, 128)
LLAMA = Geometry(layers=(FULL,) * 32)
ODD = Geometry(layers=(Layer(LayerKind.FULL, 8, 80, 8, 80),) * 32)
LOAD = ServiceLoad(geometry=LLAMA, weights=5 * GIB, n_slots=3, n_ctx=32768)


def test_a6_the_least_painful_change_comes_first() -> None:
    memory = need(LOAD).total - 1
    first, *_, shorter = nearest(LOAD, memory)
    assert first == CapacityOption(3, 32768, 8)
    assert shorter == CapacityOption(3, 31744, 16)
    assert CapacityOption(2, 32768, 16) in nearest(LOAD, memory)


def test_a6_when_no_single_change_helps_both_sizes_shrink() -> None:
    assert nearest(LOAD, 5 * GIB + 300 * 2**20) == (CapacityOption(1, 1024, 16),)
    assert nearest(LOAD, 5 * GIB) == ()


def test_a_budget_too_small_for_the_live_kv_does_not_fit_and_is_raised_first() -> None:
    kv = need(LOAD).kv
    enough = replace(LOAD, budget=Budget(100 * kv, 1))
    memory = need(LOAD).total
    assert fits(enough, memory)
    short = replace(LOAD, budget=Budget(100 * kv - 100, 1))
    assert not fits(short, memory)
    assert max_agents(short, memory) == 2
    assert max_ctx(short, memory) == LOAD.n_ctx - 1
    first, *others = nearest(short, memory)
    assert first == CapacityOption(3, 32768, 16, budget_pct=2)
    assert CapacityOption(2, 32768, 16) in others


def test_where_the_memory_is_too_small_each_change_comes_with_its_budget() -> None:
    memory = need(LOAD).total - 1
    short = replace(LOAD, budget=Budget(2 * memory, 1))
    found = nearest(short, memory)
    assert [replace(one, budget_pct=None) for one in found] == list(nearest(LOAD, memory))
    for one in found:
        changed = quantized(LLAMA, one.bits)
        assert one.budget_pct is not None
        load = replace(short, geometry=changed, n_slots=one.n_slots, n_ctx=one.n_ctx)
        assert fits(replace(load, budget=Budget(2 * memory, one.budget_pct)), memory)


def test_a6_heads_that_cannot_be_quantized_are_not_proposed_so() -> None:
    assert [one.geometry.bits for one in precisions(replace(LOAD, geometry=ODD))] == [16]
    sinks = replace(LLAMA, has_sinks=True)
    assert [one.geometry.bits for one in precisions(replace(LOAD, geometry=sinks))] == [16]
    dense = replace(LOAD, geometry=quantized(LLAMA, 8))
    assert [one.geometry.bits for one in precisions(dense)] == [8, 4]


@given(
    weights=st.integers(0, 20 * GIB),
    n_slots=st.integers(1, 20),
    n_ctx=st.integers(64, 200_000),
    memory=st.integers(0, 40 * GIB),
    geometry=st.sampled_from([LLAMA, ODD]),
)
def test_a6_whatever_is_proposed_fits(
    weights: int, n_slots: int, n_ctx: int, memory: int, geometry: Geometry
) -> None:
    load = ServiceLoad(geometry=geometry, weights=weights, n_slots=n_slots, n_ctx=n_ctx)
    for one in nearest(load, memory):
        changed = quantized(geometry, one.bits)
        assert fits(replace(load, geometry=changed, n_slots=one.n_slots, n_ctx=one.n_ctx), memory)
        assert one.n_slots <= n_slots
        assert one.n_ctx <= n_ctx


def test_a14_what_fits_goes_before_what_does_not_and_large_before_small() -> None:
    def wish(name: str, weights: int, n_trained: int = 0) -> CapacityRequest:
        return CapacityRequest(name, replace(LOAD, weights=weights), n_trained)

    wishes = [
        wish("huge", 90 * GIB),
        wish("four", 26 * GIB),
        wish("small", 2 * GIB),
        wish("eight", 23 * GIB),
        wish("short", 9 * GIB, 8192),
    ]
    found = advise(wishes, 30 * GIB)
    assert [one.name for one in found] == ["eight", "small", "four", "short", "huge"]
    assert [one.verdict for one in found] == [
        FitLevel.FITS,
        FitLevel.FITS,
        FitLevel.NEEDS_4_BIT,
        FitLevel.NOT_TRAINED,
        FitLevel.TOO_LARGE,
    ]
    assert [one.load.geometry.bits for one in found] == [8, 16, 4, 16, 16]
    assert found[0].n_agents >= 3
    assert found[-1].n_agents == 0
