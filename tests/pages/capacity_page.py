"""The page docs/capacity.md: which model on which Mac, and the KV of every preset."""

from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from mlxstack.cli.plan_tables import show_table, table_rows
from mlxstack.cli.units import size
from mlxstack.config import presets
from mlxstack.config.presets import BUILTIN_MODEL, load
from mlxstack.core.formatting import tokens
from mlxstack.core.preset import ServiceKind
from mlxstack.host.hardware import mac_memory
from mlxstack.host.home import Home
from mlxstack.planner.candidate import Candidate, of_many
from mlxstack.planner.ranking import recommendation
from mlxstack.policy.memory.capacity_advice import FitLevel
from tests.pages.preset_page import files_of

MACS_GB = (8, 16, 24, 32, 36, 48, 64, 96, 128, 192)
LOADS = ((1, 16 * 1024), (1, 64 * 1024), (3, 64 * 1024), (6, 64 * 1024))

PAGE = """\
# Capacity

## Which model on which Mac

The largest shipped preset that fits, by the memory of the Mac and by what runs on it at once. This
page is written by `make docs` from the planner; `mlx-stack plan` ranks the presets for 3 agents of
64k tokens on this machine, `mlx-stack plan --memory 48GB --agents 1 --ctx 16k` for other numbers.
Both keep 10 % of the memory for models free; `--all` shows also the presets that do not fit.

{macs}

*8-bit KV* or *4-bit KV* where 16-bit KV would not fit; *-* where no shipped preset does. Weights
take 4 bits. *For models* is what macOS lets the GPU use, less MLX's cache of freed buffers.
Any other model: `mlx-stack plan ORG/NAME`, which reads its `config.json` and nothing else.

## KV of every preset

KV per token and layer is (K heads x K dim + V heads x V dim) x bytes. Only full-attention layers
grow with every token; a sliding-window layer adds a constant, min(context, window) tokens, and
during prefill a window and a prefill chunk; a recurrent layer has a state of fixed size. KV size is
computed by building mlx-lm's own model from `config.json`, without allocating its weights, never
from the parameter count. `tests/policy` compares it with the bytes of real caches.

`mlx-stack plan --table --ctx 4096`, KV of 16 bits:

<!-- plan --table -->
```
{table}```

* 8-bit KV takes 0.53 of this, 4-bit 0.28, scales included (`kv.bits`), where the model can:
  [models](models.md) has the column.
* KV has what weights, compute buffers and the system's reserve leave
  (`prefix_cache.memory_budget_pct: auto`).
* Weights on disk are not weights in memory; `up` measures after loading.
* On a Mac the ceiling is what Metal recommends as working set, not the size of the memory.
* Services of the same home share the memory. Other programs that hold models (Ollama, LM Studio)
  are not counted: end them, or leave them their part with `MLX_STACK_MEMORY`.

```bash
mlx-stack plan gpt-oss-20b --memory 32 --ctx 32k --agents 10
mlx-stack plan --memory 32GB --ctx 16k --agents 5
mlx-stack spec demo
```
"""


def page() -> str:
    """The whole page."""
    with TemporaryDirectory() as folder:
        home = Home(Path(folder))
        loaded = [load(name, home).preset for name in sorted(presets.listed(home))]
    chat = [
        preset
        for preset in loaded
        if preset.kind is ServiceKind.CHAT and preset.model.id != BUILTIN_MODEL
    ]
    candidates = of_many([(preset, files_of(preset)) for preset in chat])
    headings = ("Mac", "for models", *(f"{n} x {tokens(n_ctx)}" for n, n_ctx in LOADS))
    rows = [headings, ("---",) * len(headings), *(_mac(gb, candidates) for gb in MACS_GB)]
    macs = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return PAGE.format(macs=macs, table=_table(candidates))


def _mac(gb: int, candidates: Sequence[Candidate]) -> tuple[str, ...]:
    memory = mac_memory(f"{gb}GB")
    cells = []
    for n_agents, n_ctx in LOADS:
        best = recommendation(candidates, memory, n_agents, n_ctx)[0]
        bits = best.load.geometry.bits
        dense = f", {bits}-bit KV" if bits < 16 else ""
        fits = best.verdict in {FitLevel.FITS, FitLevel.NEEDS_4_BIT}
        cells.append(f"`{best.name}`{dense}" if fits else "-")
    return (f"{gb} GB", size(memory.usable), *cells)


def _table(candidates: Sequence[Candidate]) -> str:
    output = StringIO()
    with redirect_stdout(output):
        show_table(table_rows(candidates, [4096]))
    return "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines())
