"""`cache`: inspect, warm, pin and clear KV; explain misses."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxstack.cli.commands import gc as sweeps
from mlxstack.cli.commands.gc import DryRun, MaxBytes, OlderThan
from mlxstack.cli.output import as_json, say, table
from mlxstack.cli.service_request import ServiceOptions, path_of
from mlxstack.cli.streams import finishes
from mlxstack.cli.verbs import Json, VerbApp, VerbResult
from mlxstack.core.agent_labels import agent_name, prefix_label
from mlxstack.core.formatting import age, clipped, count, printable, share, short_time, size, span

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mlxstack.core.status import (
        CacheView,
        DiskView,
        MissSums,
        MissView,
        PrefixView,
        RequestView,
    )

app = VerbApp(help="Inspect and manage the KV cache. Without a verb: the status.")

Watch = Annotated[bool, typer.Option("--watch", help="Refresh every two seconds.")]
PrefixName = Annotated[str, typer.Argument(help="The name of the prefix.")]
WATCH_S = 2.0
MAX_NAME_WIDTH = 40
"""Characters of the name of a prefix in the status."""
MIN_S = 0.0005
"""Shorter phases are left out."""
NOTHING = "Nothing is kept yet."


@app.without_verb
@app.command()
def status(service: ServiceOptions, json: Json = False, watch: Watch = False) -> None:
    """Show budget, entries, hit rates and top prefixes."""
    while True:
        view = _cache_view(service)
        if json:
            as_json(view)
        else:
            say(render(view, labels(service)))
        if not watch:
            return
        time.sleep(WATCH_S)


@app.command()
def top(service: ServiceOptions) -> VerbResult:
    """List pinned and the most used prefixes."""
    prefixes = _cache_view(service).prefixes
    if not prefixes:
        return VerbResult(prefixes, NOTHING)
    titles = labels(service)
    headings = ("NAME", "HITS", "TOKENS", "SIZE", "AGE", "PINNED")
    return VerbResult(
        prefixes, lambda: table(headings, [_row(prefix, titles) for prefix in prefixes])
    )


@app.command()
def why(
    request: Annotated[str, typer.Argument(help="A request id, or an agent.")],
    service: ServiceOptions,
) -> VerbResult:
    """Show how much a request reused, and the reason for the rest."""
    from mlxstack.core.request import TurnKind
    from mlxstack.core.status import RequestView

    path = path_of("requests", request)
    view = service.ask(lambda client: client.get(path, RequestView))
    reused = f"{count(view.n_cached)} of {count(view.n_prompt)} prompt tokens reused"
    lines = [f"{view.id}: {reused}", *_phases(view)]
    if view.n_begun_early:
        begun = count(view.n_begun_early)
        used = count(view.n_used_early)
        lines.append(f"begun early: {begun} tokens, used {used}")
    if view.thinking is not None:
        lines.append(f"thinking: {view.thinking.description}")
    if view.turn_kind is not TurnKind.PERSON:
        lines.append(f"turn: {view.turn_kind}, priority {view.priority.name.lower()}")
    if view.drops_kv:
        lines.append("its KV was dropped at its end; its slot is as before")
    lines += [f"ended repetition: {stop}" for stop in view.loops]
    if view.repeated_call:
        lines.append(f"repeated call: {view.repeated_call}")
    lines.append(_reason(view.miss, labels(service)) if view.miss else "no miss")
    disk = _cache_view(service).disk
    if disk is not None and disk.trouble:
        lines.append(disk.trouble)
    return VerbResult(view, "\n".join(lines))


@app.command()
@finishes()
def warm(
    prefix: PrefixName,
    file: Annotated[Path, typer.Argument(help="A text file; .json: messages of a chat.")],
    service: ServiceOptions,
) -> VerbResult:
    """Compute a prefix from a file, and keep it under a name."""
    from mlxstack.client.prefix_file import prefix_in

    done = service.post("/cache/prefixes", prefix_in(file) | {"name": prefix})
    return VerbResult(done, f"{prefix}: {count(done['n_tokens'])} tokens are kept")


@app.command()
@finishes()
def unpin(prefix: PrefixName, service: ServiceOptions) -> VerbResult:
    """Unpin a named prefix."""
    path = path_of("cache", "prefixes", prefix)
    done = service.ask(lambda client: client.delete(path))
    return VerbResult(done, f"{prefix} is no longer kept")


@app.command()
@finishes()
def clear(service: ServiceOptions) -> VerbResult:
    """Drop KV in memory that is neither in use nor pinned."""
    done = service.post("/cache/clear", {})
    return VerbResult(done, f"{size(done['n_bytes'])} freed")


@app.command()
@finishes()
def gc(
    service: ServiceOptions,
    max_bytes: MaxBytes = None,
    older_than: OlderThan = None,
    dry_run: DryRun = False,
) -> VerbResult:
    """Delete stored KV that nothing saved needs, by age and bytes."""
    from mlxstack.core.commands import CollectGarbage, GCScope

    sweep = CollectGarbage(max_bytes, older_than, GCScope.KV, is_dry=dry_run)
    return sweeps.collect(sweep, service)


def render(view: "CacheView", titles: "Mapping[str, str]") -> str:
    """Status as text; `titles` of agents by their ids."""
    hour = view.hour
    lines = [
        f"Prefix cache{'' if view.is_enabled else ': switched off'}",
        f"  memory     {size(view.memory_bytes)}{_of(view.memory_budget)}",
        f"  disk       {size(view.disk_bytes)}{_of(view.disk_budget)}",
        *_writes(view.disk),
        f"  entries    {count(view.n_entries)}",
        f"  hits       {share(hour.n_hits, hour.n_requests)} of the requests of the last hour, "
        f"{share(hour.n_cached, hour.n_prompt)} of their tokens",
        f"  saved      {span(hour.saved_s)} in the last hour, "
        f"{share(hour.saved_s, hour.saved_s + hour.ttft_s)} of the time until first tokens",
        "",
        "Top prefixes:",
    ]
    lines += [_line(prefix, titles) for prefix in view.prefixes] or [f"  {NOTHING}"]
    if view.losses:
        lines += ["", "Misses since the start:", *(_sums(sums) for sums in view.losses)]
    lost = sorted((miss for miss in view.misses if miss.n_lost), key=lambda miss: -miss.lost_s)
    if costly := lost[:5]:
        lines += [
            "",
            "Last misses, the costliest first:",
            *(f"  {_reason(m, titles)}" for m in costly),
        ]
    return "\n".join(lines)


def _writes(disk: "DiskView | None") -> list[str]:
    if disk is None:
        return []
    text = f"  written    {size(disk.today.kv_bytes)}{_of(disk.max_daily_bytes)} of KV today"
    return [text, f"             {disk.trouble}"] if disk.trouble else [text]


def _cache_view(service: ServiceOptions) -> "CacheView":
    from mlxstack.core.status import CacheView

    return service.ask(lambda client: client.get("/cache", CacheView))


def labels(service: ServiceOptions) -> dict[str, str]:
    """Labels of agents by their ids."""
    from mlxstack.cli.agent_names import labels_of
    from mlxstack.core.errors import StackError

    try:
        agents = service.ask(lambda client: client.get("/v1/agents", dict[str, Any]))
    except StackError:
        # An embedding service has no agents.
        return {}
    return labels_of(agents["data"])


def _row(prefix: "PrefixView", titles: "Mapping[str, str]") -> tuple[object, ...]:
    is_pinned = "-"
    if prefix.is_pinned:
        is_pinned = "yes"
    return (
        prefix_label(prefix, titles),
        count(prefix.n_hits),
        count(prefix.n_tokens),
        size(prefix.n_bytes),
        age(prefix.age_s),
        is_pinned,
    )


def _line(prefix: "PrefixView", titles: "Mapping[str, str]") -> str:
    name = clipped(prefix_label(prefix, titles), MAX_NAME_WIDTH).ljust(MAX_NAME_WIDTH)
    return (
        f"  {name}  {count(prefix.n_hits):>5} hits  {count(prefix.n_tokens):>5} tokens"
        f"  {size(prefix.n_bytes):>9}  {age(prefix.age_s)}"
    )


def _sums(sums: "MissSums") -> str:
    return f"  {sums.reason:<24} {count(sums.n_misses):>5}  {_cost(sums.n_lost, sums.lost_s)}"


def _phases(request: "RequestView") -> list[str]:
    """Line of the phases until the first token, if there was one."""
    from mlxstack.core.engine_events import PHASE_NAMES

    if not request.ttft_s:
        return []
    parts = [
        f"{name} {short_time(seconds)}"
        for phase, name in PHASE_NAMES.items()
        if (seconds := getattr(request, phase)) >= MIN_S
    ]
    return [f"first token after {short_time(request.ttft_s)}: {', '.join(parts)}"]


def _reason(miss: "MissView", titles: "Mapping[str, str]") -> str:
    who = miss.request
    if miss.agent:
        who = agent_name(miss.agent, titles)
    cost = _cost(miss.n_lost, miss.lost_s)
    if miss.at is None:
        return f"{who}: {miss.reason}; {cost}"
    where = f"{who}: {miss.reason} at token {miss.at}"
    if not miss.n_lost:
        return f"{where}; {cost}"
    texts = f"`{printable(miss.text_cached, 40)}` -> `{printable(miss.text_sent, 40)}`"
    return f"{where}, after `{printable(miss.text_shared[-40:])}`: {texts}; {cost}"


def _cost(n_lost: int, lost_s: float) -> str:
    if n_lost:
        return f"lost {count(n_lost)} tokens, {short_time(lost_s)}"
    return "lost nothing"


def _of(budget: int | None) -> str:
    if budget is None:
        return ""
    return f" / {size(budget)}"
