"""`bench dev serve`: agents on our server and a reference."""

from collections.abc import Callable, Sequence

from msgspec import Struct

from mlxstack.bench.dev.serving_scenarios import Figures, ServePlan, played
from mlxstack.bench.dev.taken_path import path_table
from mlxstack.bench.report import Bar, BarChart, BenchTarget, ReportTable, Results, at_most
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


def results(by_server: dict[str, Figures], plan: ServePlan, bounds: SilenceBounds) -> Results:
    """Tables of all servers' scenes, and targets of the first."""
    first = next(iter(by_server.values()))
    names = played(plan.scenes)
    tables = [TABLES[name](by_server, plan) for name in names if name in TABLES]
    targets: list[BenchTarget] = []
    charts = []
    if "crowds" in names:
        charts.append(_crowd_chart(by_server, plan))
    if "joining" in names:
        targets += _joining_targets(first, bounds)
        charts.append(_pause_chart(by_server, plan))
    if "picture" in names:
        tables += _pictures(by_server, plan)
        targets += _picture_targets(first, bounds)
    if "counts" in names:
        tables += _counts(by_server)
        targets += _count_targets(first)
    tables += path_table(by_server)
    raw = {
        f"{who}: {figure}": v for who, figures in by_server.items() for figure, v in figures.items()
    }
    return Results(tuple(tables), tuple(targets), raw, tuple(charts))


def _joining_targets(figures: Figures, bounds: SilenceBounds) -> tuple[BenchTarget, ...]:
    """Silence bounded, and the newcomer not made to pay for it."""
    p99 = ratio(percentile(figures["gaps joining"], 99), bounds.max_stall_s)
    worst = ratio(max(figures["gaps joining"], default=0.0), bounds.max_stall_s)
    newcomer = ratio(median(figures["newcomer"]), median(figures["cold"]))
    return (
        at_most("p99 gap while a long prompt joins, against max_stall_ms", p99, 1.2),
        at_most("worst gap while a long prompt joins, against max_stall_ms", worst, 1.2),
        at_most("the newcomer's TTFT, against alone", newcomer, 1.5),
    )


def _picture_targets(figures: Figures, bounds: SilenceBounds) -> tuple[BenchTarget, ...]:
    if not figures.get("gaps shown"):
        return ()
    worst = ratio(max(figures["gaps shown"]), bounds.max_stall_s)
    return (at_most("worst gap while a picture joins, against max_stall_ms", worst, 1.2),)


def _count_targets(figures: Figures) -> tuple[BenchTarget, ...]:
    if not figures.get("counts"):
        return ()
    grown = ratio(mean(figures["gaps counting"]), mean(figures["gaps uncounted"]))
    return (
        at_most("p95 of 26 token counts at once, against 200 ms", _p95(figures) / 0.2, 1.0),
        at_most("mean gap of decoding agents in that second, against the one before", grown, 1.2),
    )


def _p95(figures: Figures) -> float:
    return percentile(figures["counts"], 95)


def mean(values: Sequence[float]) -> float:
    """0 of none."""
    return ratio(sum(values), len(values))


def median(values: Sequence[float]) -> float:
    """0 of none."""
    return spread(values).median if values else 0.0


def _turns(by_server: dict[str, Figures], _: ServePlan) -> ReportTable:
    rows = tuple(
        (name, *(lasting(figures[figure]) for figure in ALL), str(round(median(figures["n cold"]))))
        for name, figures in by_server.items()
    )
    heads = ("Server", *ALL.values(), "Prompt tokens")
    return ReportTable("Time to first token", heads, rows)


def _crowds(by_server: dict[str, Figures], plan: ServePlan) -> ReportTable:
    rows = tuple(
        crowd_row(name, figures, n, plan) for name, figures in by_server.items() for n in plan.crowd
    )
    heads = (
        *("Server", "Agents", "Requests", "Total tokens", "Time", "Throughput", "Decode"),
        *("Latency avg", "p50", "p99", "TTFT p50", "Speedup", "Result"),
    )
    note = (
        f"{plan.n_prompt} unknown tokens in, {plan.n_answer} out, all at once. Throughput counts "
        "generated tokens over the whole time, decode while all are being answered."
    )
    return ReportTable("Agents at once", heads, rows, note)


def _crowd_chart(by_server: dict[str, Figures], plan: ServePlan) -> BarChart:
    bars = [
        Bar(f"{n} {name}", rate := throughput(figures, n), f"{rate:.0f}")
        for n in plan.crowd
        for name, figures in by_server.items()
    ]
    return BarChart("Tokens per second by agents at once", tuple(bars))


def _pause_chart(by_server: dict[str, Figures], plan: ServePlan) -> BarChart:
    worst = {name: max(figures["gaps joining"], default=0.0) for name, figures in by_server.items()}
    bars = [Bar(name, value, seconds(value)) for name, value in worst.items()]
    title = f"Worst pause of three agents while {plan.split.total} tokens join"
    return BarChart(title, tuple(bars))


def crowd_row(name: str, figures: Figures, n: int, plan: ServePlan) -> tuple[str, ...]:
    """Row of a crowd's passes; speedup is throughput against one agent."""
    latency = figures[f"crowd {n}: latency"]
    tokens = sum(figures[f"crowd {n}: tokens"])
    took = sum(figures[f"crowd {n}: seconds"])
    speedup = ratio(throughput(figures, n), throughput(figures, plan.crowd[0]))
    return (
        name,
        str(n),
        str(len(latency)),
        f"{tokens:.0f}",
        seconds(took),
        f"{throughput(figures, n):.1f} tokens/s",
        f"{median(figures[f'crowd {n}: decode']):.1f} tokens/s",
        seconds(sum(latency) / len(latency)),
        seconds(percentile(latency, 50)),
        seconds(percentile(latency, 99)),
        seconds(percentile(figures[f"crowd {n}: ttft"], 50)),
        times(speedup),
        summary(speedup) if n > plan.crowd[0] else "-",
    )


def throughput(figures: Figures, n: int) -> float:
    """Generated tokens per second of `n` agents."""
    return ratio(sum(figures[f"crowd {n}: tokens"]), sum(figures[f"crowd {n}: seconds"]))


def summary(speedup: float) -> str:
    """Against the promise of 2 to 4 times."""
    if speedup >= 2:
        return "meets"
    return "partial" if speedup >= 1.5 else "below"


def _short(by_server: dict[str, Figures], plan: ServePlan) -> ReportTable:
    rows = tuple(
        (
            name,
            lasting(figures["one by one"]),
            lasting(figures["together"]),
            times(ratio(median(figures["one by one"]), median(figures["together"]))),
        )
        for name, figures in by_server.items()
    )
    title = f"{plan.team} agents, 50 tokens each"
    return ReportTable(title, ("Server", "One by one", "Together", "Speedup"), rows)


def _interference(by_server: dict[str, Figures], plan: ServePlan) -> ReportTable:
    rows = tuple(
        (
            name,
            seconds(percentile(figures["gaps calm"], 50)),
            seconds(percentile(figures["gaps joining"], 50)),
            seconds(percentile(figures["gaps joining"], 99)),
            seconds(max(figures["gaps joining"], default=0.0)),
            lasting(figures["newcomer"]),
            lasting(figures["cold"]),
        )
        for name, figures in by_server.items()
    )
    heads = ("Server", "Gap before", "Gap p50", "p99", "Worst", "Newcomer's TTFT", "Alone")
    note = "Silence between two tokens of three agents while the newcomer's prompt is computed."
    return ReportTable(f"A cold prompt of {plan.split.total} tokens joins", heads, rows, note)


def _pictures(by_server: dict[str, Figures], plan: ServePlan) -> tuple[ReportTable, ...]:
    """One table, if a server takes images."""
    rows = tuple(
        (
            name,
            seconds(percentile(figures["gaps unshown"], 50)),
            seconds(percentile(figures["gaps shown"], 50)),
            seconds(percentile(figures["gaps shown"], 99)),
            seconds(max(figures["gaps shown"])),
            lasting(figures["picture"]),
            str(round(median(figures["n picture"]))),
        )
        for name, figures in by_server.items()
        if figures.get("gaps shown")
    )
    heads = ("Server", "Gap before", "Gap p50", "p99", "Worst", "TTFT", "Prompt tokens")
    note = "Silence between two tokens of three agents while the picture is encoded and prefilled."
    title = f"A picture of {plan.picture_side} x {plan.picture_side} pixels joins"
    if rows:
        return (ReportTable(title, heads, rows, note),)
    return ()


def _team(by_server: dict[str, Figures], plan: ServePlan) -> ReportTable:
    rows = tuple(
        (
            name,
            lasting(figures["team one by one"]),
            lasting(figures["team at once"]),
            seconds(median(figures["team first ttft"])),
            seconds(max(figures["team first ttft"])),
            seconds(median(figures["team later ttft"])),
            f"{100 * sum(figures['team reused']) / len(figures['team reused']):.1f} %",
        )
        for name, figures in by_server.items()
    )
    heads = ("Server", "Taking turns", "At once", "TTFT turn 1", "Worst", "TTFT later", "Reused")
    title = f"{plan.team} agents x {plan.n_turns} turns, one head"
    note = f"About {plan.team_split.total} tokens in, {plan.n_team_answer} out per turn."
    return ReportTable(title, heads, rows, note)


def _counts(by_server: dict[str, Figures]) -> tuple[ReportTable, ...]:
    """One table, if a server counts tokens."""
    rows = tuple(
        (
            name,
            seconds(percentile(figures["counts"], 50)),
            seconds(_p95(figures)),
            seconds(mean(figures["gaps uncounted"])),
            seconds(mean(figures["gaps counting"])),
            seconds(max(figures["gaps uncounted"], default=0.0)),
            seconds(max(figures["gaps counting"], default=0.0)),
        )
        for name, figures in by_server.items()
        if figures.get("counts")
    )
    heads = ("Server", "Count p50", "p95", "Mean gap before", "After", "Worst before", "After")
    note = "Gaps of the three in the second before the counts, and in the one from then on."
    title = "26 token counts at once while three agents decode"
    if rows:
        return (ReportTable(title, heads, rows, note),)
    return ()


def _requests(by_server: dict[str, Figures], plan: ServePlan) -> ReportTable:
    rows = tuple(
        (name, f"{median(figures['requests per second']):.1f}")
        for name, figures in by_server.items()
    )
    title = f"Requests per second, {plan.n_clients} clients, a warm prompt, one token"
    return ReportTable(title, ("Server", "Requests/s"), rows)


TABLES: dict[str, Callable[[dict[str, Figures], ServePlan], ReportTable]] = {
    "turns": _turns,
    "crowds": _crowds,
    "short": _short,
    "joining": _interference,
    "team": _team,
    "requests": _requests,
}
