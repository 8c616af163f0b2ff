"""`python -m tests.matrix.more` examines the types of mlx-vlm that mlx-lm lacks: `make models`.

It runs in the environment of the extra `more-models`, and writes their section of docs/models.md.
`python -m tests.matrix.more NAME ...` examines these and prints their rows. Each type has a
process of its own; rows are kept in ROWS, so that a run which was ended goes on where it stopped.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from mlx_lm.models.cache import QuantizedKVCache

from mlxstack.engine.decode.batching_check import self_check
from mlxstack.engine.decode.copy_check import why_not_copied
from mlxstack.engine.model.cache_adapters import CacheFactory, leaves
from mlxstack.engine.model.runner import ModelRunner
from tests.matrix import checks, more_table
from tests.matrix.builder import Unbuildable, build, mlx_vlm_types
from tests.matrix.configs import VOCAB
from tests.matrix.examine import BATCHED, attempt, describe, message
from tests.matrix.more_configs import NOT_LANGUAGE
from tests.matrix.more_http import check_http
from tests.matrix.more_row import MoreRow

LIMIT_S = 1800
ONE = "--one"
ROWS = Path(os.environ.get("MLX_STACK_MODEL_ROWS", ".venv/models-rows.jsonl"))


def examine(name: str) -> MoreRow:
    """Everything about this type."""
    if name in NOT_LANGUAGE:
        return MoreRow(name, note=NOT_LANGUAGE[name])
    try:
        model = build(name)
        cache_factory = CacheFactory(model, checks.KV16)
        caches = describe(cache_factory.make())
        check = self_check(model, cache_factory, VOCAB)
        why_not = copy_check(model, cache_factory)
    except Unbuildable as error:
        return MoreRow(name, note=f"not built: {error}")
    except Exception as error:
        return MoreRow(name, note=f"does not run: {message(error)}")
    faults: list[str] = []
    attempt(faults, "pieces", lambda: checks.check_pieces(model, cache_factory))
    batched = attempt(faults, "batch", lambda: checks.check_batch(model, cache_factory, check.rows))
    hit = attempt(faults, "hit", lambda: checks.check_rewind(model, cache_factory))
    fork = attempt(faults, "fork", lambda: checks.check_fork(model, cache_factory))
    stored = attempt(faults, "store", lambda: checks.check_stored(model, cache_factory))
    drafts = "no"
    if check.can_draft:
        drafts = attempt(faults, "drafts", lambda: checks.check_drafts(model, cache_factory, check))
    kv8, why_not_8 = examine_kv8(model)
    with TemporaryDirectory() as work:
        served = attempt(faults, "HTTP", lambda: check_http(name, Path(work)))
    return MoreRow(
        name,
        caches,
        batched or BATCHED[check.rows],
        hit,
        served,
        fork,
        stored,
        drafts or "yes",
        kv8,
        "; ".join(filter(None, (check.why_not, why_not, why_not_8))),
        tuple(faults),
    )


def copy_check(model: Any, cache_factory: CacheFactory) -> str | None:
    """Why its contexts are not copied, as the engine finds at load."""
    why_not = why_not_copied(ModelRunner(model), cache_factory, VOCAB)
    cache_factory.can_copy = why_not is None
    return why_not


def examine_kv8(model: Any) -> tuple[str, str]:
    """Whether batch, hit and restore hold with 8-bit KV, and if not, why."""
    cache_factory = CacheFactory(model, checks.KV8)
    if not any(isinstance(leaf, QuantizedKVCache) for leaf in leaves(cache_factory.make())):
        return "none", ""
    try:
        check = self_check(model, cache_factory, VOCAB)
        copy_check(model, cache_factory)
        checks.check_batch(model, cache_factory, check.rows)
        checks.check_rewind(model, cache_factory)
        checks.check_stored(model, cache_factory)
    except Exception as error:
        return "no", f"8-bit KV: {message(error)}"
    return BATCHED[check.rows], ""


def apart(name: str) -> MoreRow:
    """Examine in a process of its own; its death is a fault."""
    if name in NOT_LANGUAGE:
        return examine(name)
    command = [sys.executable, "-m", "tests.matrix.more", ONE, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return MoreRow(name, note=f"not examined within {LIMIT_S} s")
    lines = [text for text in done.stdout.splitlines() if text.startswith("{")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return MoreRow(name, note=f"its process ended with {done.returncode}: {last}")
    return msgspec.json.decode(lines[-1], type=MoreRow)


def kept_rows() -> dict[str, MoreRow]:
    """Rows of runs before, by name."""
    if not ROWS.is_file():
        return {}
    decoded = [msgspec.json.decode(line, type=MoreRow) for line in ROWS.read_text().splitlines()]
    return {row.name: row for row in decoded}


def main(names: list[str]) -> int:
    """The number of types whose checks failed."""
    if names[:1] == [ONE]:
        print(msgspec.json.encode(examine(names[1])).decode(), flush=True)  # noqa: T201
        return 0
    rows = kept_rows() if not names else {}
    for name in names or sorted(mlx_vlm_types() - rows.keys()):
        row = rows[name] = apart(name)
        print(msgspec.json.encode(row).decode(), flush=True)  # noqa: T201
        with ROWS.open("a") as file:
            file.write(msgspec.json.encode(row).decode() + "\n")
    if not names:
        ordered = [rows[name] for name in sorted(rows)]
        more_table.PAGE.write_text(more_table.page(ordered, more_table.PAGE.read_text()))
    return sum(bool(row.faults) for row in rows.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
