"""What fits where."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxstack.policy.memory.capacity import (
    MARGIN_BYTES,
    Budget,
    ServiceLoad,
    disk_bytes,
    fits,
    max_agents,
    max_ctx,
    need,
    quantized,
)
from tests.policy.test_geometry import geometry

MIB = 1024**2
GIB = 1024**3

LLAMA = geometry(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
    }
)
GEMMA = geometry(
    {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
    }
)
LOAD = ServiceLoad(geometry=LLAMA, weights=5 * GIB, workspace=GIB, n_slots=3, n_ctx=8192)


def test_a6_the_sum_is_what_counts() -> None:
    parts = need(LOAD)
    assert parts.kv_full == 3 * LLAMA.growth * (8192 + 510)
    assert parts.kv_state == 0
    assert parts.total == 5 * GIB + parts.kv_full + GIB + MARGIN_BYTES
    assert fits(LOAD, parts.total)
    assert not fits(LOAD, parts.total - 1)


@given(
    n_slots=st.integers(1, 40),
    n_ctx=st.integers(1024, 65536),
    memory=st.integers(6 * GIB, 64 * GIB),
    pct=st.none() | st.integers(1, 90),
)
def test_the_most_agents_fit_and_one_more_does_not(
    n_slots: int, n_ctx: int, memory: int, pct: int | None
) -> None:
    budget = None if pct is None else Budget(memory, pct)
    load = replace(LOAD, n_slots=n_slots, n_ctx=n_ctx, budget=budget)
    assert need(load).kv_full >= n_slots * LLAMA.growth * n_ctx
    most = max_agents(load, memory)
    assert most == 0 or fits(replace(load, n_slots=most), memory)
    assert not fits(replace(load, n_slots=most + 1), memory)


def test_a_draft_model_has_a_context_in_each_slot() -> None:
    plain = need(LOAD)
    drafted = need(replace(LOAD, draft=GEMMA))
    grown = 3 * GEMMA.peak_full_bytes(8192)
    assert drafted.kv_full - plain.kv_full == grown
    assert drafted.kv_state == 3 * GEMMA.state_bytes(8192, LOAD.chunk) > 0
    assert max_agents(replace(LOAD, draft=GEMMA), 20 * GIB) < max_agents(LOAD, 20 * GIB)


def test_a6_one_window_is_larger_while_its_slot_prefills() -> None:
    load = ServiceLoad(geometry=GEMMA, weights=0, n_slots=3, n_ctx=8192, chunk=512)
    layer_bytes = 40 * 8192
    assert need(load).kv_state == layer_bytes * (1024 + 1024 + 1023 + 512)


def test_a13_the_published_numbers_at_4096() -> None:
    assert LOAD.geometry.n_bytes(4096) == 512 * MIB
    assert GEMMA.n_bytes(4096) == 576 * MIB


def test_c15_disk_forecast_for_50k_tokens_counts_the_window_once() -> None:
    forecast = disk_bytes(GEMMA, 50_000)
    exact = 50_000 * 64 * 1024 + 320 * MIB
    assert exact < forecast < exact * 1.001
    assert disk_bytes(GEMMA, 50_000, 3) - forecast == pytest.approx(640 * MIB, rel=0.001)
    assert disk_bytes(LLAMA, 1000, 5) == disk_bytes(LLAMA, 1000)
    assert disk_bytes(LLAMA, 0) == 0


def test_k4_eight_bit_kv_fits_almost_twice_the_agents() -> None:
    plain = max_agents(LOAD, 24 * GIB)
    dense = max_agents(replace(LOAD, geometry=quantized(LLAMA, 8)), 24 * GIB)
    assert plain < dense <= plain / 0.53 + 1


def test_nothing_fits_into_nothing() -> None:
    assert max_agents(LOAD, 5 * GIB) == 0
    assert max_ctx(LOAD, 5 * GIB) == 0


loads = st.builds(
    ServiceLoad,
    geometry=st.sampled_from([LLAMA, GEMMA, quantized(LLAMA, 4)]),
    weights=st.integers(0, 10 * GIB),
    workspace=st.integers(0, GIB),
    n_slots=st.integers(1, 10),
    n_ctx=st.integers(64, 100_000),
    chunk=st.integers(16, 2048),
)


@given(load=loads, memory=st.integers(GIB, 64 * GIB))
def test_f7_max_is_the_last_that_fits(load: ServiceLoad, memory: int) -> None:
    agents = max_agents(load, memory)
    assert agents == 0 or fits(replace(load, n_slots=agents), memory)
    assert not fits(replace(load, n_slots=agents + 1), memory)
    ctx = max_ctx(load, memory)
    assert ctx == 0 or fits(replace(load, n_ctx=ctx), memory)
    assert not fits(replace(load, n_ctx=ctx + 1), memory)
