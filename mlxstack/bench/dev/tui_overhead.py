"""`bench dev tui`: what an attached dashboard costs the service, and itself."""

import asyncio
import os
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.bench.dev.headless_tui import Spectator, spectator
from mlxstack.bench.dev.sandbox import Sandbox, service
from mlxstack.bench.dev.workload import question
from mlxstack.bench.report import ReportTable, Results, at_most
from mlxstack.bench.statistics import ratio, spread
from mlxstack.bench.timed_request import Caller, TimedRequest
from mlxstack.core.errors import Broken
from mlxstack.core.preset import SlotSpec

DECODERS = 3
FRAMES_PER_S = 4.0
"""At most so many the service sends; the share of a core is told for this many."""

MOST_COST, MOST_CPU = 2.0, 10.0
NOTE = (
    "CPU is the share of one core. The cost is the median over passes of what watched windows "
    "lack against the unwatched ones around them. BLAS leaves one core free, as a GPU leaves all."
)


class WatchPlan(Struct, frozen=True):
    """Three agents decode all the time. A pass has four windows of `window_s` seconds.

    The first and the last run without a dashboard, so that what drifts hits both alike. `settle_s`
    seconds lie before each window; an answer has `n_answer` tokens, few enough that every window
    sees contexts of all lengths.
    """

    passes: int = 3
    window_s: float = 10.0
    settle_s: float = 1.0
    n_prompt: int = 100
    n_answer: int = 50


SMALL = WatchPlan(1, 1.0, 0.3, 20, 100)


class ClockWindow(Struct, frozen=True):
    """A stretch of the clock; `cpu_s` and `n_frames` are the dashboard's, if there is one."""

    began: float
    ended: float
    cpu_s: float | None = None
    n_frames: int = 0

    @property
    def seconds(self) -> float:
        """Its length in seconds."""
        return self.ended - self.began


async def run(stage: Sandbox, plan: WatchPlan) -> Results:
    """Raises Broken when a dashboard does not attach, or when nothing was decoded."""
    slots = SlotSpec(count=DECODERS, n_ctx=1024 + plan.n_answer + plan.n_prompt)
    n_threads = max(1, (os.cpu_count() or 2) - 1)
    stage = replace(stage, env={**stage.env, "OPENBLAS_NUM_THREADS": str(n_threads)})
    async with service(stage, "tui", slots) as server, Caller(server) as caller:
        enough = asyncio.Event()
        talks = [asyncio.create_task(_talk(caller, plan, i, enough)) for i in range(DECODERS)]
        try:
            windows = await _windows(stage, plan, server.url)
        finally:
            enough.set()
            timed = [one for talk in await asyncio.gather(*talks) for one in talk]
    return results(windows, timed)


def results(windows: Sequence[ClockWindow], timed: Sequence[TimedRequest]) -> Results:
    """Throughput with and without, the share of a core, and both targets."""
    watched = [one for one in windows if one.cpu_s is not None]
    alone = tuple(_rate(one, timed) for one in windows if one.cpu_s is None)
    seen = tuple(_rate(one, timed) for one in watched)
    if not (alone and seen and min(alone) > 0):
        raise Broken("nothing was decoded while it was measured")
    costs = tuple(
        100 * (1 - ratio(*pair)) for pair in zip(_by_pass(seen), _by_pass(alone), strict=True)
    )
    frames = tuple(one.n_frames / one.seconds for one in watched)
    shares = tuple(100 * (one.cpu_s or 0.0) / one.seconds for one in watched)
    scaled = tuple(share * ratio(FRAMES_PER_S, n) for share, n in zip(shares, frames, strict=True))
    rows = (
        ("no dashboard", _several(alone, "tokens/s"), "-", "-"),
        (
            "a dashboard is attached",
            _several(seen, "tokens/s"),
            _several(frames, "/s"),
            _several(shares, "%"),
        ),
        ("what it costs, pass by pass", _several(costs, "%"), "-", "-"),
    )
    heads = ("Service", f"Decode of {DECODERS} agents", "Frames", "CPU of the dashboard")
    return Results(
        (ReportTable("What a dashboard costs", heads, rows, NOTE),),
        (
            at_most(
                "decode throughput that a dashboard costs", spread(costs).median, MOST_COST, "%"
            ),
            at_most("CPU of the dashboard at 4 frames/s", spread(scaled).median, MOST_CPU, "%"),
        ),
        {"alone": alone, "watched": seen, "costs": costs, "frames": frames, "cpu": shares},
    )


async def _talk(
    caller: Caller, plan: WatchPlan, number: int, enough: asyncio.Event
) -> list[TimedRequest]:
    """One long answer after another."""
    said: list[TimedRequest] = []
    yard = await caller.yardstick()
    while not enough.is_set():
        body = question(plan.n_prompt, yard, f"watched {number} {len(said)}")
        said.append(await caller.request(body, plan.n_answer, enough, ignore_eos=True))
    return said


async def _windows(stage: Sandbox, plan: WatchPlan, url: str) -> list[ClockWindow]:
    found = []
    for i in range(plan.passes):
        stage.say(f"three agents decode, watched and not, pass {i + 1}")
        found.append(await _window(plan, None))
        async with spectator(stage, url) as watcher:
            found += [await _window(plan, watcher) for _ in range(2)]
        found.append(await _window(plan, None))
    return found


async def _window(plan: WatchPlan, watcher: Spectator | None) -> ClockWindow:
    await asyncio.sleep(plan.settle_s)
    began = Caller.clock()
    cpu_s, n_frames = (watcher.cpu_s(), watcher.n_frames()) if watcher else (0.0, 0)
    await asyncio.sleep(plan.window_s)
    ended = Caller.clock()
    if watcher is None:
        return ClockWindow(began, ended)
    return ClockWindow(began, ended, watcher.cpu_s() - cpu_s, watcher.n_frames() - n_frames)


def _rate(window: ClockWindow, timed: Sequence[TimedRequest]) -> float:
    n = sum(window.began < at <= window.ended for one in timed for at in one.marks)
    return n / window.seconds


def _by_pass(rates: Sequence[float]) -> tuple[float, ...]:
    """The two windows of each pass together: what drifts within a pass hits both kinds alike."""
    return tuple(a + b for a, b in zip(rates[::2], rates[1::2], strict=True))


def _several(values: Sequence[float], unit: str) -> str:
    of = spread(values)
    return f"{of.median:.3g} {unit} ({of.low:.3g} to {of.high:.3g})"
