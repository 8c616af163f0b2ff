"""`bench dev tui`: what an attached dashboard costs the service, and itself."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence

import psutil
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.bench.dev.headless_tui import Spectator, cpu_s, spectator
from mlxstack.bench.dev.steal import TRIES, told, undisturbed
from mlxstack.bench.dev.timed_request import TimedClient, TimedRequest
from mlxstack.bench.dev.workload import question
from mlxstack.bench.report import ReportTable, Results, at_most
from mlxstack.bench.servers import Sandbox, ServerUnderTest, service
from mlxstack.bench.statistics import ratio, spread
from mlxstack.core.errors import Broken
from mlxstack.core.preset import SlotSpec

DECODERS = 3
SIZES = ((80, 24), (200, 50))
"""Columns and lines of the terminals."""

FRAMES_PER_S = 2.0
"""Frames of a busy service to divide CPU time by."""

MAX_COST = 2.0
MAX_CPU = 10.0
NOTE = (
    "CPU is the share of one core. The cost is the median over passes of the CPU seconds per "
    "token that the service takes more in watched windows than in the two unwatched ones around "
    "them. BLAS leaves one core free, as a GPU leaves all."
)


Ask = Callable[[str], Awaitable[TimedRequest]]


class WatchPlan(Struct, frozen=True):
    """Watch benchmark: three decoding agents, windows of `window_s` seconds.

    The first and the last run without a dashboard, the others with one of each size. `settle_s`
    seconds lie before each window; an answer has `n_answer` tokens, few enough that every window
    sees contexts of all lengths.
    """

    passes: int = 3
    window_s: float = 10.0
    settle_s: float = 1.0
    n_prompt: int = 100
    n_answer: int = 50
    tries: int = TRIES


SMALL = WatchPlan(1, 1.0, 0.3, 20, 100, 1)


class ClockWindow(Struct, frozen=True):
    """Clock window, with the CPU seconds of the service in it.

    `cpu_s` and `n_frames` are those of the dashboard of `size`, if any.
    """

    began: float
    ended: float
    service_cpu_s: float
    size: tuple[int, int] | None = None
    cpu_s: float = 0.0
    n_frames: int = 0

    @property
    def seconds(self) -> float:
        return self.ended - self.began


async def run(stage: Sandbox, plan: WatchPlan) -> Results:
    """Measure the windows. Raises Broken without attachment or decoding."""
    slots = SlotSpec(count=DECODERS, n_ctx=1024 + plan.n_answer + plan.n_prompt)
    n_threads = max(1, (os.cpu_count() or 2) - 1)
    stage = replace(stage, env={**stage.env, "OPENBLAS_NUM_THREADS": str(n_threads)})
    async with service(stage, "tui", slots) as server, TimedClient(server) as caller:
        enough = asyncio.Event()
        yard = await caller.yardstick()

        def ask(name: str) -> Awaitable[TimedRequest]:
            body = question(plan.n_prompt, yard, name)
            return caller.request(body, plan.n_answer, enough, ignore_eos=True)

        # The first forward passes of a process are slow.
        await asyncio.gather(*(ask(f"warm {i}") for i in range(DECODERS)))
        talks = [asyncio.create_task(_talk(ask, i, enough)) for i in range(DECODERS)]
        try:
            windows, shares = await _windows(stage, plan, server)
        finally:
            enough.set()
            timed = [request for talk in await asyncio.gather(*talks) for request in talk]
    return results(windows, timed, told(shares))


def results(
    windows: Sequence[ClockWindow], timed: Sequence[TimedRequest], disturbance: str = ""
) -> Results:
    """Throughput and costs without and with dashboards by size, and CPU share."""
    if not windows or not all(_n_tokens(window, timed) for window in windows):
        raise Broken("nothing was decoded while it was measured")
    unwatched = [window for window in windows if window.size is None]
    alone = tuple(_rate(window, timed) for window in unwatched)
    around = tuple(
        (_cpu_per_token(a, timed) + _cpu_per_token(b, timed)) / 2
        for a, b in zip(unwatched[::2], unwatched[1::2], strict=True)
    )
    rows = [("no dashboard", _several(alone, "tokens/s"), "-", "-", "-")]
    targets = []
    raw = {"alone": alone, "service cpu per token alone": around}
    for size in SIZES:
        name = "x".join(map(str, size))
        watched = [window for window in windows if window.size == size]
        seen = tuple(_rate(window, timed) for window in watched)
        spent = tuple(_cpu_per_token(window, timed) for window in watched)
        costs = tuple(100 * (ratio(*pair) - 1) for pair in zip(spent, around, strict=True))
        frames = tuple(window.n_frames / window.seconds for window in watched)
        shares = tuple(100 * window.cpu_s / window.seconds for window in watched)
        scaled = [s * ratio(FRAMES_PER_S, n) for s, n in zip(shares, frames, strict=True)]
        several = (_several(seen, "tokens/s"), _several(costs, "%"), _several(frames, "/s"))
        rows.append((f"a dashboard of {name}", *several, _several(shares, "%")))
        cost = spread(costs).median
        share = spread(scaled).median
        targets += [
            at_most(f"CPU per token that a dashboard of {name} adds", cost, MAX_COST, "%"),
            at_most(f"CPU of it at {FRAMES_PER_S:g} frames/s", share, MAX_CPU, "%"),
        ]
        raw |= {f"watched {name}": seen, f"frames {name}": frames, f"cpu {name}": shares}
        raw |= {f"service cpu per token {name}": spent}
    heads = ("Service", f"Decode of {DECODERS} agents", "Cost", "Frames", "CPU of the dashboard")
    table = ReportTable(
        "What a dashboard costs", heads, tuple(rows), f"{NOTE} {disturbance}".strip()
    )
    return Results((table,), tuple(targets), raw)


async def _talk(ask: Ask, number: int, enough: asyncio.Event) -> list[TimedRequest]:
    """One long answer after another."""
    requests: list[TimedRequest] = []
    while not enough.is_set():
        requests.append(await ask(f"watched {number} {len(requests)}"))
    return requests


async def _windows(
    stage: Sandbox, plan: WatchPlan, server: ServerUnderTest
) -> tuple[list[ClockWindow], list[float]]:
    process = psutil.Process(server.pid)
    windows: list[ClockWindow] = []
    shares: list[float] = []

    async def measure(watcher: Spectator | None, size: tuple[int, int] | None) -> None:
        window, share = await undisturbed(lambda: _window(plan, process, watcher, size), plan.tries)
        windows.append(window)
        shares.append(share)

    for i in range(plan.passes):
        stage.say(f"three agents decode, watched and not, pass {i + 1}")
        await measure(None, None)
        for size in SIZES:
            async with spectator(stage, server.url, size) as watcher:
                await measure(watcher, size)
        await measure(None, None)
    return windows, shares


async def _window(
    plan: WatchPlan,
    service: psutil.Process,
    watcher: Spectator | None = None,
    size: tuple[int, int] | None = None,
) -> ClockWindow:
    await asyncio.sleep(plan.settle_s)
    began = TimedClient.clock()
    before_s = cpu_s(service)
    watched_s, n_frames = (watcher.cpu_s(), watcher.n_frames()) if watcher else (0.0, 0)
    await asyncio.sleep(plan.window_s)
    ended = TimedClient.clock()
    service_s = cpu_s(service) - before_s
    if watcher is None:
        return ClockWindow(began, ended, service_s)
    watched_s = watcher.cpu_s() - watched_s
    n_frames = watcher.n_frames() - n_frames
    return ClockWindow(began, ended, service_s, size, watched_s, n_frames)


def _n_tokens(window: ClockWindow, timed: Sequence[TimedRequest]) -> int:
    return sum(window.began < mark <= window.ended for request in timed for mark in request.marks)


def _rate(window: ClockWindow, timed: Sequence[TimedRequest]) -> float:
    return _n_tokens(window, timed) / window.seconds


def _cpu_per_token(window: ClockWindow, timed: Sequence[TimedRequest]) -> float:
    return window.service_cpu_s / _n_tokens(window, timed)


def _several(values: Sequence[float], unit: str) -> str:
    of = spread(values)
    return f"{of.median:.3g} {unit} ({of.low:.3g} to {of.high:.3g})"
