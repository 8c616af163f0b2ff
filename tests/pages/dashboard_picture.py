"""The picture of the README: the dashboard on a tape of three coding agents at work.

`make shots` runs this; it needs cairosvg, which is installed for it, and a font with box drawing.
"""

import asyncio
import re
import sys
from itertools import islice
from pathlib import Path

from msgspec.structs import replace

from mlxstack.core.engine_events import CacheMiss
from mlxstack.core.engine_snapshot import RequestPhase, SlotView, Snapshot, WaitingView
from mlxstack.core.request import Priority
from mlxstack.core.status import PrefixView, StatusFrame
from mlxstack.tui.app import Dashboard
from mlxstack.tui.recording import RecordingFeed
from mlxstack.tui.theme import ThemeChoice
from tests.tui import scenes

PICTURE = Path(__file__).parents[2] / "docs" / "img" / "dashboard.png"
SIZE = (120, 30)
N_FRAMES = 256
"""Frames of the tape, whose last one is in the middle of a prefill."""

FONT = "DejaVu Sans Mono"
CLAUDE, CODEX, OPENCODE = "claude · shop-api", "codex · infra", "opencode · blog"
MODEL = "qwen3.6-35b-a3b"
NAMES = {"claude-main": CLAUDE, "opencode-2": CODEX, "aider": OPENCODE}
N_CTX = 65_536

SLOTS = (
    SlotView(0, N_CTX, RequestPhase.RUNNING, "chatcmpl-71c5", CLAUDE, 31_204, 31_040, 31_040,
             30_911, 164, 3_932, 88.4, 640 * scenes.MIB, 0.0, True),
    SlotView(1, N_CTX, RequestPhase.PREFILLING, "chatcmpl-71c6", CODEX, 26_912, 41_804, 26_912,
             1_280, 0, 4_096, 0.0, 536 * scenes.MIB, 0.0, True, CacheMiss("diverged", 1_312)),
    SlotView(2, N_CTX, RequestPhase.COMPLETED, "chatcmpl-71b9", OPENCODE, 18_144, 18_048, 18_048,
             17_920, 96, 0, 0.0, 354 * scenes.MIB, 24.0, True),
)  # fmt: skip
WAITING = (WaitingView("chatcmpl-71c7", CLAUDE, Priority.HIGH, 20_480, 1.8, 0),)


def tape() -> tuple[StatusFrame, ...]:
    """Five minutes of the tests' tape, with the names of a developer's morning."""
    snapshot = Snapshot(
        slots=SLOTS,
        waiting=WAITING,
        counters=replace(scenes.BUSY_COUNTERS, n_cancelled=3, n_failed=0),
        active_bytes=22 * scenes.GIB,
        kv_bytes=round(1.6 * scenes.GIB),
    )
    frames = islice(scenes._working(snapshot), N_FRAMES)
    return tuple(_renamed(frame) for frame in frames)


def _renamed(frame: StatusFrame) -> StatusFrame:
    facts = replace(frame.service, model=MODEL, architecture="qwen3_5_moe", preset=MODEL,
                    n_ctx=N_CTX, mode=None)  # fmt: skip
    agents = tuple(
        replace(one, id=NAMES[one.id], states=()) for one in frame.agents or () if one.id in NAMES
    )
    requests = tuple(
        replace(one, agent=NAMES[one.agent]) for one in frame.requests or () if one.agent in NAMES
    )
    cache = frame.cache
    if cache is not None:
        prefixes = tuple(_prefix(one) for one in cache.prefixes if one.name.isprintable())
        misses = tuple(replace(one, agent=NAMES.get(one.agent or "")) for one in cache.misses)
        cache = replace(cache, prefixes=prefixes, misses=misses)
    return replace(frame, service=facts, agents=agents, requests=requests, cache=cache)


def _prefix(one: PrefixView) -> PrefixView:
    return replace(one, agents=tuple(NAMES.get(name, CLAUDE) for name in one.agents))


async def svg() -> str:
    """The first screen after the tape."""
    app = Dashboard(RecordingFeed("127.0.0.1:7109", tape()), None, ThemeChoice())
    async with app.run_test(size=SIZE) as pilot:
        await pilot.app.workers.wait_for_complete()
        await pilot.pause()
        await pilot.pause()
        return app.export_screenshot(title="mlx-stack tui")


def main() -> int:
    """Write the picture."""
    import cairosvg

    drawn = re.sub(r"font-family:\s*[^;]+;", f"font-family: {FONT};", asyncio.run(svg()))
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    cairosvg.svg2png(bytestring=drawn.encode(), write_to=str(PICTURE), output_width=1800)
    return 0


if __name__ == "__main__":
    sys.exit(main())
