"""`bench dev cache`: return time of agents, and cost of saves."""

import statistics
from collections.abc import Callable, Sequence

from mlxstack.bench.dev.in_process_trials import measure
from mlxstack.bench.dev.prefix_cache_scenarios import (
    BLOCK,
    CachePlan,
    Returns,
    Saves,
    Start,
    returns,
    saves,
    team_starts,
)
from mlxstack.bench.dev.timed_request import TimedRequest
from mlxstack.bench.dev.trials import BenchResult, SingleFloor
from mlxstack.bench.report import Bar, BarChart, BenchTarget, ReportTable, Results, at_most
from mlxstack.bench.servers import Sandbox
from mlxstack.bench.statistics import lasting, megabytes, percentile, ratio, seconds, spread, times

GAPS: dict[str, Callable[[Sequence[float]], float]] = {
    "p50": lambda gaps: percentile(gaps, 50),
    "mean": statistics.fmean,
    "worst": max,
}
"""Bounds for the reported inter-token latency, in seconds."""

RESTORING = (
    "Each is the first that a new process reads, by turns: both pay for memory they never had. "
    "The files are in the page cache."
)


async def run(stage: Sandbox, plan: CachePlan) -> Results:
    """Run all scenes, with own services, and in-process floors."""
    came = await returns(stage, plan)
    teams = await team_starts(stage, plan)
    saved = await saves(stage, plan)
    stage.say("the floors, in process")
    floors = measure(stage, [_floor(context, plan) for context in came])
    return Results(
        (_returns(came, floors), _teams(teams), _saves(saved), _restores(saved)),
        (*_return_targets(came, floors), *_team_targets(teams), *_save_targets(saved)),
        {
            **{
                f"{context.total} {name}": ttfts(getattr(context, name))
                for context in came
                for name in WHERE
            },
            **{
                f"{context.total} floor": floor.of("floor", "ttft_s")
                for context, floor in zip(came, floors, strict=True)
            },
            "team ttft": tuple(t.ttft_s for start in teams for t in start.timed),
            "gaps before a save": saved.gaps_before,
            "gaps during a save": saved.gaps_during,
        },
        (_chart(came[-1]),),
    )


WHERE = ("cold", "warm", "hot", "same")


def ttfts(timed: Sequence[TimedRequest]) -> tuple[float, ...]:
    """Seconds to the first token."""
    return tuple(request.ttft_s for request in timed)


def _median(timed: Sequence[TimedRequest]) -> float:
    return spread(ttfts(timed)).median


def _floor(context: Returns, plan: CachePlan) -> SingleFloor:
    """Tokens computed by the next turn in the same slot."""
    last = context.same[-1]
    return SingleFloor(last.usage.cached_tokens, max(2, last.n_computed), plan.passes)


def _returns(came: Sequence[Returns], floors: Sequence[BenchResult]) -> ReportTable:
    rows = []
    for context, floor in zip(came, floors, strict=True):
        cold = _median(context.cold)
        for name in WHERE:
            timed: Sequence[TimedRequest] = getattr(context, name)
            rows.append(
                (
                    f"{context.cold[0].usage.prompt_tokens} tokens, {SAID[name]}",
                    str(timed[-1].usage.cached_tokens),
                    str(timed[-1].n_computed),
                    lasting(ttfts(timed)),
                    times(ratio(_median(timed), cold)),
                )
            )
        floor_s = floor.of("floor", "ttft_s")
        label = f"... these {max(2, context.same[-1].n_computed)} tokens in process"
        rows.append((label, "-", "-", lasting(floor_s), times(ratio(spread(floor_s).median, cold))))
    heads = ("Prompt, and where its beginning was", "Reused", "Computed", "TTFT", "Against cold")
    note = "System, tools, history and new turn as 2000 : 1500 : 500 : 50; fresh words each pass."
    return ReportTable("An agent comes back", heads, tuple(rows), note)


SAID = {
    "cold": "cold",
    "warm": "warm (disk, after a restart)",
    "hot": "hot (memory, parked)",
    "same": "same slot",
}


def _chart(context: Returns) -> BarChart:
    medians = {name: _median(getattr(context, name)) for name in WHERE}
    bars = (Bar(SAID[name], value, seconds(value)) for name, value in medians.items())
    return BarChart(
        f"Time to first token, {context.cold[0].usage.prompt_tokens} tokens", tuple(bars)
    )


def _teams(teams: Sequence[Start]) -> ReportTable:
    rows = tuple(
        (
            str(i + 1),
            str(len(start.timed)),
            str(start.n_alone),
            str(start.n_least),
            str(start.n_computed),
            seconds(_median(start.timed)),
            seconds(max(ttfts(start.timed))),
        )
        for i, start in enumerate(teams)
    )
    heads = ("Pass", "Agents", "Prompt tokens", "Head once", "Computed", "TTFT p50", "TTFT worst")
    note = "All at once, with one new shared prefix; the least is head plus suffixes."
    return ReportTable("A team starts together", heads, rows, note)


def _saves(saved: Saves) -> ReportTable:
    before = saved.gaps_before
    during = saved.gaps_during
    written = sum(turn["n_written"] for turn in saved.turns)
    took = saved.big["timings"]["save_ms"] / 1e3
    rows = (
        (
            f"{len(saved.turns)} turns, a save after each",
            f"{megabytes(written)} written for {megabytes(_state_bytes(saved))}",
            times(ratio(written, _state_bytes(saved))),
        ),
        *(
            (
                f"{name} of the others' gaps while {megabytes(saved.big['n_bytes'])} are saved in "
                f"{seconds(took)}",
                f"{seconds(of(before))} before, {seconds(of(during))} during",
                times(ratio(of(during), of(before))),
            )
            for name, of in GAPS.items()
        ),
    )
    return ReportTable("Saving", ("What", "Measured", "Ratio"), rows)


def _restores(saved: Saves) -> ReportTable:
    restored = _restored_s(saved)
    loaded = _loaded_s(saved)
    n_bytes = saved.loaded[0].of("mx.load", "bytes")[0]
    rows = (
        (
            "restore, until evaluated",
            str(saved.restored[0]["n_restored"]),
            lasting(restored),
            f"{_restore_speed(saved) / 1e6:.0f} MB/s",
        ),
        (
            "mx.load of the same files, evaluated",
            "-",
            f"{lasting(loaded)} for {megabytes(n_bytes)}",
            f"{_load_speed(saved) / 1e6:.0f} MB/s",
        ),
        ("computing it again", str(saved.big["n_saved"]), seconds(saved.cold_s), "-"),
    )
    heads = ("What", "Tokens", "Time", "Speed")
    return ReportTable("Restoring", heads, rows, RESTORING)


def _state_bytes(saved: Saves) -> float:
    """Bytes of the last state, by the bytes per token between saves.

    (The `n_bytes` of a save count whole segments, also where only their first tokens are used.)
    """
    first = saved.turns[0]
    last = saved.turns[-1]
    per_token = ratio(last["n_bytes"] - first["n_bytes"], last["n_saved"] - first["n_saved"])
    return per_token * float(last["n_saved"])


def _restored_s(saved: Saves) -> tuple[float, ...]:
    return tuple(reply["timings"]["restore_ms"] / 1e3 for reply in saved.restored)


def _loaded_s(saved: Saves) -> tuple[float, ...]:
    return tuple(took for result in saved.loaded for took in result.of("mx.load", "load_s"))


def _restore_speed(saved: Saves) -> float:
    return ratio(saved.restored[0]["n_read"], spread(_restored_s(saved)).median)


def _load_speed(saved: Saves) -> float:
    return ratio(saved.loaded[0].of("mx.load", "bytes")[0], spread(_loaded_s(saved)).median)


def _return_targets(
    came: Sequence[Returns], floors: Sequence[BenchResult]
) -> tuple[BenchTarget, ...]:
    """For the longest prompt."""
    longest = came[-1]
    floor = spread(floors[-1].of("floor", "ttft_s")).median
    cold = _median(longest.cold)
    reported_s = spread(tuple(timed.told_s for timed in longest.hot)).median
    return (
        at_most("hot TTFT, against cold", ratio(_median(longest.hot), cold), 0.10),
        at_most("disk TTFT, against cold", ratio(_median(longest.warm), cold), 0.25),
        at_most("same slot TTFT, against in process", ratio(_median(longest.same), floor), 1.15),
        at_most(
            "hot TTFT saved as told, off the measured one by",
            abs(ratio(reported_s, cold - _median(longest.hot)) - 1),
            0.30,
        ),
    )


def _team_targets(teams: Sequence[Start]) -> tuple[BenchTarget, ...]:
    """Target: at most one block beyond the least for each member."""
    over = max((s.n_computed - s.n_least) / len(s.timed) for s in teams)
    return (at_most("team start: tokens beyond the least, per agent", over, BLOCK, "tokens"),)


def _save_targets(saved: Saves) -> tuple[BenchTarget, ...]:
    written = sum(turn["n_written"] for turn in saved.turns)
    slowness = ratio(_load_speed(saved), _restore_speed(saved))
    grown = {name: ratio(of(saved.gaps_during), of(saved.gaps_before)) for name, of in GAPS.items()}
    return (
        at_most("restoring, against mx.load", slowness, 2.0),
        at_most(
            "written in all turns, against the last state", ratio(written, _state_bytes(saved)), 1.2
        ),
        *(at_most(f"{name} gap while saving, against before", n, 2.0) for name, n in grown.items()),
    )
