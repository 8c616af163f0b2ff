"""`python -m tests.mac.dispatches` prints what decode steps would launch on Metal, counted here."""

from collections.abc import Callable
from functools import partial

import mlx.core as mx
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from mlxstack.bench.dev.in_process.contestants import Ours, Theirs
from tests.mac.decode_graphs import (
    MODELS,
    TinyModel,
    build,
    compile_experts,
    fused_kernels,
    input_sizes,
    rows_of,
    step_of,
)
from tests.mac.dispatch_counts import (
    BufferLimits,
    Operation,
    count_barriers,
    count_command_buffers,
    count_dispatches,
)

ROWS = (1, 4, 8)
LIMITS = {
    "base, Pro": BufferLimits(40, 40),
    "Max, Ultra": BufferLimits(50, 50),
    "raised": BufferLimits(1000, 400),
}
"""MLX's own limits of a command buffer by GPU, and higher ones."""
LENGTHS = {"1k": 1024, "32k": 32_768}
BY_ROW = partial(Ours, is_stacking=False)
LEGEND = "dispatches / barriers; command buffers with " + ", ".join(
    f"{limits.n_operations}/{limits.n_elements} ({name})" for name, limits in LIMITS.items()
)


class StepCounts(Struct, frozen=True):
    """A decode step on Metal; command buffers by tokens of each row, then by limits."""

    n_dispatches: int
    n_barriers: int
    n_buffers: tuple[tuple[int, ...], ...]


def counts_of(tape: list[Operation], model: TinyModel, n_rows: int) -> StepCounts:
    """Counts of a step of this model in MLX's order."""
    sizes = [input_sizes(tape, model, n_rows, n_keys) for n_keys in LENGTHS.values()]
    buffers = [
        tuple(count_command_buffers(tape, size, limits) for limits in LIMITS.values())
        for size in sizes
    ]
    return StepCounts(count_dispatches(tape), count_barriers(tape), tuple(buffers))


def counts_by_rows(model: TinyModel, contestant: Callable[..., Ours | Theirs]) -> list[StepCounts]:
    """Counts of a step of each number of rows."""
    sampling = model.real.sampling
    steps = [
        step_of(contestant(model.model, rows_of(model, n), sampling=sampling), model) for n in ROWS
    ]
    return [counts_of(tape, model, n) for n, tape in zip(ROWS, steps, strict=True)]


def main() -> None:
    """Print a row for each model and number of rows."""
    table = Table("model", "rows", caption=LEGEND)
    titles = ("mlx-stack", "experts compiled", "mlx-lm's batch")
    for title in (*titles, *(f"buffers, {length}" for length in LENGTHS)):
        table.add_column(title, justify="right")
    with fused_kernels():
        for name, real in MODELS.items():
            model = build(real)
            ours = counts_by_rows(model, BY_ROW)
            theirs = counts_by_rows(model, Theirs)
            has_experts = compile_experts(model, ROWS)
            compiled = counts_by_rows(model, BY_ROW) if has_experts else [None] * len(ROWS)
            for n_rows, own, in_blocks, theirs_of in zip(ROWS, ours, compiled, theirs, strict=True):
                launches = map(_launches, (own, in_blocks, theirs_of))
                buffers = [", ".join(map(str, pair)) for pair in own.n_buffers]
                table.add_row(name, str(n_rows), *launches, *buffers)
    Console().print(table)


def _launches(counts: StepCounts | None) -> str:
    return "-" if counts is None else f"{counts.n_dispatches:,} / {counts.n_barriers:,}"


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    main()
