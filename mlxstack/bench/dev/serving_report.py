"""`bench dev serve`: agents on our server and a reference."""

from collections.abc import Callable, Sequence

from msgspec import Struct

from mlxstack.bench.dev.report import Bar, BarChart, BenchTarget, ReportTable, Results, at_most
from mlxstack.bench.dev.serving_scenarios import Found, ServePlan, played
from mlxstack.bench.dev.taken_path import path_table
from mlxstack.bench.statistics import lasting, percentile, ratio, seconds, spread, times

ALL = {
    "cold": "cold",
    "again": "the same prompt again",
    "next turn": "next turn",
    "branch": "another turn in its place",
    "sibling": "a sibling with the same head",
}


class SilenceBounds(Struct, frozen=True):
    """Promised bound of the inter-token latency, in seconds."""

    max_stall_s: float = 0.25


def results(found: dict[str, Found], plan: ServePlan, bounds: SilenceBounds) -> Results:
    """Tables of all servers' scenes, and targets of the first."""
    first = next(iter(found.values()))
    names = played(plan.scenes)
    tables = [TABLES[name](found, plan) for name in names if name in TABLES]
    tables += _pictures(found, plan) if "picture" in names else ()
    tables += _counts(found) if "counts" in names else ()
    tables += path_table(found)
    targets = [*(_joining_targets(first, bounds) if "joining" in names else ())]
    targets += _picture_targets(first, bounds) if "picture" in names else ()
    targets += _count_targets(first) if "counts" in names else ()
    charts = [*((_crowd_chart(found, plan),) if "crowds" in names else ())]
    charts += (_pause_chart(found, plan),) if "joining" in names else ()
    raw = {f"{who}: {what}": v for who, one in found.items() for what, v in one.items()}
    return Results(tuple(tables), tuple(targets), raw, tuple(charts))


def _joining_targets(one: Found, bounds: SilenceBounds) -> tuple[BenchTarget, ...]:
    """Silence bounded, and the newcomer not made to pay for it."""
    p99 = ratio(percentile(one["gaps joining"], 99), bounds.max_stall_s)
    worst = ratio(max(one["gaps joining"], default=0.0), bounds.max_stall_s)
    newcomer = ratio(median(one["newcomer"]), median(one["cold"]))
    return (
        at_most("p99 gap while a long prompt joins, against max_stall_ms", p99, 1.2),
        at_most("worst gap while a long prompt joins, against max_stall_ms", worst, 1.2),
        at_most("the newcomer's TTFT, against alone", newcomer, 1.5),
    )


def _picture_targets(one: Found, bounds: SilenceBounds) -> tuple[BenchTarget, ...]:
    if not one.get("gaps shown"):
        return ()
    worst = ratio(max(one["gaps shown"]), bounds.max_stall_s)
    return (at_most("worst gap while a picture joins, against max_stall_ms", worst, 1.2),)


def _count_targets(one: Found) -> tuple[BenchTarget, ...]:
    if not one.get("counts"):
        return ()
    grown = ratio(mean(one["gaps counting"]), mean(one["gaps uncounted"]))
    return (
        at_most("p95 of 26 token counts at once, against 200 ms", _p95(one) / 0.2, 1.0),
        at_most("mean gap of decoding agents in that second, against the one before", grown, 1.2),
    )


def _p95(one: Found) -> float:
    return percentile(one["counts"], 95)


def mean(values: Sequence[float]) -> float:
    """0 of none."""
    return sum(values) / len(values) if values else 0.0


def median(values: Sequence[float]) -> float:
    """0 of none."""
    return spread(values).median if values else 0.0


def _turns(found: dict[str, Found], _: ServePlan) -> ReportTable:
    rows = tuple(
        (name, *(lasting(one[what]) for what in ALL), str(round(median(one["n cold"]))))
        for name, one in found.items()
    )
    heads = ("Server", *ALL.values(), "Prompt tokens")
    return ReportTable("Time to first token", heads, rows)


def _crowds(found: dict[str, Found], plan: ServePlan) -> ReportTable:
    rows = tuple(crowd_row(name, one, n, plan) for name, one in found.items() for n in plan.crowd)
    heads = (
        *("Server", "Agents", "Requests", "Total tokens", "Time", "Throughput", "Decode"),
        *("Latency avg", "p50", "p99", "TTFT p50", "Speedup", "Result"),
    )
    note = (
        f"{plan.n_prompt} unknown tokens in, {plan.n_answer} out, all at once. Throughput counts "
        "generated tokens over the whole time, decode while all are being answered."
    )
    return ReportTable("Agents at once", heads, rows, note)


def _crowd_chart(found: dict[str, Found], plan: ServePlan) -> BarChart:
    bars = [
        Bar(f"{n} {name}", rate := throughput(one, n), f"{rate:.0f}")
        for n in plan.crowd
        for name, one in found.items()
    ]
    return BarChart("Tokens per second by agents at once", tuple(bars))


def _pause_chart(found: dict[str, Found], plan: ServePlan) -> BarChart:
    worst = {name: max(one["gaps joining"], default=0.0) for name, one in found.items()}
    bars = [Bar(name, value, seconds(value)) for name, value in worst.items()]
    title = f"Worst pause of three agents while {plan.split.total} tokens join"
    return BarChart(title, tuple(bars))


def crowd_row(name: str, one: Found, n: int, plan: ServePlan) -> tuple[str, ...]:
    """Row of a crowd's passes; speedup is throughput against one agent."""
    latency = one[f"crowd {n}: latency"]
    tokens = sum(one[f"crowd {n}: tokens"])
    took = sum(one[f"crowd {n}: seconds"])
    speedup = ratio(throughput(one, n), throughput(one, plan.crowd[0]))
    return (
        name,
        str(n),
        str(len(latency)),
        f"{tokens:.0f}",
        seconds(took),
        f"{throughput(one, n):.1f} tokens/s",
        f"{median(one[f'crowd {n}: decode']):.1f} tokens/s",
        seconds(sum(latency) / len(latency)),
        seconds(percentile(latency, 50)),
        seconds(percentile(latency, 99)),
        seconds(percentile(one[f"crowd {n}: ttft"], 50)),
        times(speedup),
        summary(speedup) if n > plan.crowd[0] else "-",
    )


def throughput(one: Found, n: int) -> float:
    """Generated tokens per second of `n` agents."""
    return ratio(sum(one[f"crowd {n}: tokens"]), sum(one[f"crowd {n}: seconds"]))


def summary(speedup: float) -> str:
    """Against the promise of 2 to 4 times."""
    if speedup >= 2:
        return "meets"
    return "partial" if speedup >= 1.5 else "below"


def _short(found: dict[str, Found], plan: ServePlan) -> ReportTable:
    rows = tuple(
        (
            name,
            lasting(one["one by one"]),
            lasting(one["together"]),
            times(ratio(median(one["one by one"]), median(one["together"]))),
        )
        for name, one in found.items()
    )
    title = f"{plan.team} agents, 50 tokens each"
    return ReportTable(title, ("Server", "One by one", "Together", "Speedup"), rows)


def _interference(found: dict[str, Found], plan: ServePlan) -> ReportTable:
    rows = tuple(
        (
            name,
            seconds(percentile(one["gaps calm"], 50)),
            seconds(percentile(one["gaps joining"], 50)),
            seconds(percentile(one["gaps joining"], 99)),
            seconds(max(one["gaps joining"], default=0.0)),
            lasting(one["newcomer"]),
            lasting(one["cold"]),
        )
        for name, one in found.items()
    )
    heads = ("Server", "Gap before", "Gap p50", "p99", "Worst", "Newcomer's TTFT", "Alone")
    note = "Silence between two tokens of three agents while the newcomer's prompt is computed."
    return ReportTable(f"A cold prompt of {plan.split.total} tokens joins", heads, rows, note)


def _pictures(found: dict[str, Found], plan: ServePlan) -> tuple[ReportTable, ...]:
    """One table, if a server takes images."""
    rows = tuple(
        (
            name,
            seconds(percentile(one["gaps unshown"], 50)),
            seconds(percentile(one["gaps shown"], 50)),
            seconds(percentile(one["gaps shown"], 99)),
            seconds(max(one["gaps shown"])),
            lasting(one["picture"]),
            str(round(median(one["n picture"]))),
        )
        for name, one in found.items()
        if one.get("gaps shown")
    )
    heads = ("Server", "Gap before", "Gap p50", "p99", "Worst", "TTFT", "Prompt tokens")
    note = "Silence between two tokens of three agents while the picture is encoded and prefilled."
    title = f"A picture of {plan.picture_side} x {plan.picture_side} pixels joins"
    if rows:
        return (ReportTable(title, heads, rows, note),)
    return ()


def _team(found: dict[str, Found], plan: ServePlan) -> ReportTable:
    rows = tuple(
        (
            name,
            lasting(one["team one by one"]),
            lasting(one["team at once"]),
            seconds(median(one["team first ttft"])),
            seconds(max(one["team first ttft"])),
            seconds(median(one["team later ttft"])),
            f"{100 * sum(one['team reused']) / len(one['team reused']):.1f} %",
        )
        for name, one in found.items()
    )
    heads = ("Server", "Taking turns", "At once", "TTFT turn 1", "Worst", "TTFT later", "Reused")
    title = f"{plan.team} agents x {plan.n_turns} turns, one head"
    note = f"About {plan.team_split.total} tokens in, {plan.n_team_answer} out per turn."
    return ReportTable(title, heads, rows, note)


def _counts(found: dict[str, Found]) -> tuple[ReportTable, ...]:
    """One table, if a server counts tokens."""
    rows = tuple(
        (
            name,
            seconds(percentile(one["counts"], 50)),
            seconds(_p95(one)),
            seconds(mean(one["gaps uncounted"])),
            seconds(mean(one["gaps counting"])),
            seconds(max(one["gaps uncounted"], default=0.0)),
            seconds(max(one["gaps counting"], default=0.0)),
        )
        for name, one in found.items()
        if one.get("counts")
    )
    heads = ("Server", "Count p50", "p95", "Mean gap before", "After", "Worst before", "After")
    note = "Gaps of the three in the second before the counts, and in the one from then on."
    title = "26 token counts at once while three agents decode"
    if rows:
        return (ReportTable(title, heads, rows, note),)
    return ()


def _requests(found: dict[str, Found], plan: ServePlan) -> ReportTable:
    rows = tuple((name, f"{median(one['requests per second']):.1f}") for name, one in found.items())
    title = f"Requests per second, {plan.n_clients} clients, a warm prompt, one token"
    return ReportTable(title, ("Server", "Requests/s"), rows)


TABLES: dict[str, Callable[[dict[str, Found], ServePlan], ReportTable]] = {
    "turns": _turns,
    "crowds": _crowds,
    "short": _short,
    "joining": _interference,
    "team": _team,
    "requests": _requests,
}
