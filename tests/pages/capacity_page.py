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
from mlxstack.planner.candidate import Candidate
from mlxstack.planner.ranking import recommendation
from mlxstack.policy.memory.capacity_advice import FitLevel
from tests.pages import more_shapes
from tests.pages.preset_page import files_of

MACS_GB = (8, 16, 24, 32, 36, 48, 64, 96, 128, 192)
LOADS = ((1, 16 * 1024), (1, 64 * 1024), (3, 64 * 1024), (6, 64 * 1024))

PAGE = Path(__file__).with_name("capacity.md").read_text(encoding="utf-8")


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
    candidates = more_shapes.candidates([(preset, files_of(preset)) for preset in chat])
    headings = ("Mac", "for models", *(f"{n} x {tokens(n_ctx)}" for n, n_ctx in LOADS))
    stored = more_shapes.stored()
    batched = [candidate for candidate in candidates if candidate.preset.name not in stored]
    rows = [headings, ("---",) * len(headings), *(_mac(gb, batched) for gb in MACS_GB)]
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
