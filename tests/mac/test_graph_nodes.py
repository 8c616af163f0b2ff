"""Graph nodes of a decode step: ours against mlx-lm's batch; on a GPU each is a kernel launch."""

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlxstack.bench.dev.in_process.contestants import Ours, Theirs, filled
from mlxstack.engine.decode import attention_patch, batch
from mlxstack.engine.model import cpu_attention
from tests import models

pytestmark = pytest.mark.mlx

GOAL = 1.15
"""Nodes against mlx-lm's batch that are wanted for every model and number of rows."""
ROW_BY_ROW = {"llama": 1.29, "qwen3_moe": 1.23, "gemma3": 1.21, "gpt_oss": 1.26}
"""Limits for 8 rows that are too long or too uneven to be stacked."""
ATTENTION = "Depends"
"""Kind of node that stands for the fused attention kernel of a GPU."""

N_ROWS = 4
COPIES = ("Concatenate", "SliceUpdate", "Pad", "Contiguous", "AsType", ATTENTION)
"""Kinds of nodes that copy KV or state, or launch an attention kernel."""

CEILINGS: dict[str, tuple[int, ...]] = {
    "llama": (13, 32, 0, 0, 8, 16),
    "qwen3_moe": (13, 32, 0, 0, 8, 16),
    "gemma3": (19, 48, 0, 0, 13, 24),
    "gpt_oss": (13, 32, 0, 0, 8, 16),
    "qwen3_next": (10, 8, 0, 3, 2, 4),
    "deepseek_v3": (4, 12, 0, 0, 0, 12),
}
"""Maximum nodes of each kind in a step of N_ROWS rows that are not stacked; lowered only."""

COUNTS = (1, 4, 8)
N_TOKENS = 40
STEADY, FEW = 40, 3
"""Steps after which rows are stacked, and those of a side that stacks none."""
KINDS = {
    "llama": models.LLAMA,
    "qwen3_moe": models.EXPERTS,
    "gemma3": models.SLIDING,
    "gpt_oss": models.SINKS,
}
UNSTACKED = partial(Ours, is_stacking=False)
CONFIGS = KINDS | {"qwen3_next": models.HYBRID, "deepseek_v3": models.LATENT}


def fused(queries: mx.array, keys: mx.array, values: mx.array, **_: Any) -> mx.array:
    """One node for attention, as on a GPU."""
    (output,) = mx.depends([queries], [keys, values])
    return output


def nodes(side: Ours | Theirs, folder: Path, n_before: int = STEADY) -> Counter[str]:
    """Nodes by kind that a step evaluates after others, whatever the number of its evaluations."""
    path, n = folder / "graph.dot", Counter[str]()

    def counting(real: Any) -> Any:
        def evaluate(*given: Any) -> None:
            arrays = [a for _, a in tree_flatten(given) if isinstance(a, mx.array)]
            mx.export_to_dot(str(path), *arrays)
            n.update(re.findall(r'label ="(\w+)", shape=rectangle', path.read_text()))
            real(*given)

        return evaluate

    for _ in range(n_before):
        side.step()
    side.finish()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("eval", "async_eval"):
            patch.setattr(mx, name, counting(getattr(mx, name)))
        side.step()
    side.finish()
    return n


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_of_a_step_are_counted_against_mlx_lms_batch(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A CPU computes a step while the next one is built.
    monkeypatch.setattr(batch, "has_gpu", lambda: True)
    model, _ = load_model(models.write(tmp_path / kind, KINDS[kind]))

    def count(side: Callable[..., Ours | Theirs], n_rows: int, n_before: int = FEW) -> int:
        n_filled = N_TOKENS + STEADY - n_before
        rows = [filled(model, n_filled + i, seed=i) for i in range(n_rows)]
        return nodes(side(model, rows), tmp_path, n_before).total()

    ratios: dict[int, float] = {}
    apart: dict[int, float] = {}
    for n_rows in COUNTS:
        stacked, by_row = count(Ours, n_rows, STEADY), count(UNSTACKED, n_rows)
        theirs = count(Theirs, n_rows)
        assert min(stacked, by_row, theirs) > 100, "the step was not seen"
        ratios[n_rows], apart[n_rows] = stacked / theirs, by_row / theirs
    assert all(ratio <= GOAL for ratio in ratios.values()), ratios
    assert all(ratio <= ROW_BY_ROW[kind] for ratio in apart.values()), apart


@pytest.mark.parametrize("kind", CEILINGS)
def test_nodes_that_copy_stay_below_their_ceiling(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (attention_patch, cpu_attention, batch):
        monkeypatch.setattr(module, "has_gpu", lambda: True)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", fused)
    model, _ = load_model(models.write(tmp_path / kind, CONFIGS[kind]))
    rows = [filled(model, N_TOKENS + i, seed=i) for i in range(N_ROWS)]
    counts = nodes(UNSTACKED(model, rows), tmp_path)
    found = {name: counts[name] for name in COPIES}
    ceilings = dict(zip(COPIES, CEILINGS[kind], strict=True))
    assert {name: n for name, n in found.items() if n > ceilings[name]} == {}
