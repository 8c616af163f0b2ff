"""Dispatches, barriers and command buffers of a decode step on Metal, simulated."""

from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlxstack.bench.dev.in_process.contestants import GREEDY, Ours, Theirs
from tests import models
from tests.mac.decode_graphs import MODELS, StepModel, build, fused_kernels, rows_of, step_of
from tests.mac.dispatch_counts import (
    BufferLimits,
    Operation,
    count_barriers,
    count_command_buffers,
    count_dispatches,
    graph_of,
    tape_of,
)
from tests.mac.dispatches import BY_ROW, ROWS, StepCounts, counts_by_rows
from tests.repetition import all_in_soak

pytestmark = pytest.mark.mlx

CEILINGS = {
    "qwen3.6-35b-a3b": (
        StepCounts(1782, 998, ((83, 63, 13), (83, 73, 14))),
        StepCounts(1915, 1008, ((92, 63, 13), (123, 103, 16))),
        StepCounts(2319, 1148, ((107, 83, 14), (192, 158, 21))),
    ),
    "qwen3.5-4b": (
        StepCounts(824, 548, ((22, 18, 2), (35, 27, 4))),
        StepCounts(931, 556, ((24, 20, 3), (83, 75, 9))),
        StepCounts(1063, 572, ((27, 23, 3), (147, 139, 22))),
    ),
    "dense 4B": (
        StepCounts(716, 496, ((19, 16, 2), (75, 75, 8))),
        StepCounts(1187, 532, ((31, 25, 3), (291, 291, 36))),
        StepCounts(1767, 604, ((39, 36, 4), (579, 579, 88))),
    ),
    "qwen3-coder-30b-a3b": (
        StepCounts(1472, 940, ((75, 74, 12), (99, 98, 17))),
        StepCounts(2099, 988, ((98, 74, 12), (291, 266, 29))),
        StepCounts(3159, 1228, ((99, 98, 13), (531, 458, 48))),
    ),
}
"""By model and number of rows; lowered only."""

KINDS = {
    "llama": models.LLAMA,
    "qwen3_moe": models.EXPERTS,
    "gemma3": models.SLIDING,
    "gpt_oss": models.SINKS,
    "qwen3_next": models.HYBRID,
    "deepseek_v3": models.LATENT,
}
KIND_CEILINGS = {
    "llama": (131, 57),
    "qwen3_moe": (183, 85),
    "gemma3": (266, 120),
    "gpt_oss": (211, 93),
    "qwen3_next": (194, 102),
    "deepseek_v3": (129, 66),
}
"""Dispatches and barriers of 4 rows that are not stacked; lowered only."""
GOAL = 1.15
"""Dispatches of stacked rows against mlx-lm's batch."""
N_STACKING = 40
"""Steps after which rows are stacked."""


@pytest.fixture(autouse=True)
def kernels_of_a_gpu() -> Iterator[None]:
    with fused_kernels():
        yield


@pytest.mark.parametrize("name", all_in_soak(CEILINGS, "qwen3.6-35b-a3b", "dense 4B"))
def test_a_step_stays_below_its_ceilings(name: str) -> None:
    by_rows = counts_by_rows(build(MODELS[name]), BY_ROW)
    for n_rows, counts, ceiling in zip(ROWS, by_rows, CEILINGS[name], strict=True):
        assert counts.n_dispatches <= ceiling.n_dispatches, n_rows
        assert counts.n_barriers <= ceiling.n_barriers, n_rows
        pairs = zip(counts.n_buffers, ceiling.n_buffers, strict=True)
        is_below = [a <= b for pair in pairs for a, b in zip(*pair, strict=True)]
        assert all(is_below), (n_rows, counts.n_buffers)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_each_kind_of_model_stays_below_its_ceilings(kind: str) -> None:
    model = build(StepModel(kind, KINDS[kind], GREEDY))
    tape = step_of(BY_ROW(model.model, rows_of(model, 4)), model)
    n_dispatches, n_barriers = KIND_CEILINGS[kind]
    assert count_dispatches(tape) <= n_dispatches
    assert count_barriers(tape) <= n_barriers


@pytest.mark.parametrize("kind", ("llama", "qwen3_moe", "gemma3", "gpt_oss"))
def test_stacked_rows_launch_about_as_much_as_mlx_lms_batch(kind: str) -> None:
    model = build(StepModel(kind, KINDS[kind], GREEDY))
    stacked = step_of(Ours(model.model, rows_of(model, 8)), model, N_STACKING)
    theirs = step_of(Theirs(model.model, rows_of(model, 8)), model)
    assert count_dispatches(stacked) <= GOAL * count_dispatches(theirs)


def operations_of(*roots: mx.array, **names: mx.array) -> list[Operation]:
    return tape_of(graph_of(roots, names))


def test_operations_that_do_not_depend_on_each_other_have_no_barrier_between_them() -> None:
    x = mx.array([1.0, 2.0, 3.0])
    y = mx.array([4.0, 5.0, 6.0])
    tape = operations_of(mx.exp(x) + mx.sin(y))
    assert (count_dispatches(tape), count_barriers(tape)) == (3, 1)
    chain = operations_of(mx.exp(mx.sin(mx.cos(x))))
    assert (count_dispatches(chain), count_barriers(chain)) == (3, 2)


def test_views_are_no_dispatch_and_a_concatenation_is_one_for_each_input() -> None:
    x = mx.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    tape = operations_of(mx.exp(x.T.reshape(2, 3)[:1]), mx.concatenate([x, x, x]))
    assert (count_dispatches(tape), count_barriers(tape)) == (4, 0)


def test_an_update_in_place_is_seen_by_readers_of_the_whole_array() -> None:
    stored = mx.array([[1.0, 2.0], [3.0, 4.0]])
    stored[1:2] = mx.array([[5.0, 6.0]])
    tape = operations_of(mx.exp(stored[:1]))
    assert (count_dispatches(tape), count_barriers(tape)) == (2, 1)


def test_command_buffers_end_after_a_limit_of_operations_or_elements_is_passed() -> None:
    x = y = mx.array([1.0, 2.0, 3.0])
    for _ in range(10):
        y = mx.exp(y)
    tape = operations_of(y, x=x)
    assert count_command_buffers(tape, {}, BufferLimits(4, 40)) == 2
    assert count_command_buffers(tape, {}, BufferLimits(40, 40)) == 1
    assert count_command_buffers(tape, {"x": 41 << 20}, BufferLimits(40, 40)) == 2
