"""`cache`: inspect, warm, pin and clear KV; explain misses."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.commands import gc as sweeps
from mlxstack.cli.commands.gc import DryRun, MaxBytes, OlderThan
from mlxstack.cli.output import as_json, say, table
from mlxstack.cli.service_request import ServiceOptions, path_of
from mlxstack.cli.streams import finishes
from mlxstack.cli.verbs import Json, VerbApp, VerbResult
from mlxstack.core.agent_labels import MOST_CHARS
from mlxstack.core.formatting import age, printable, share, size

if TYPE_CHECKING:
    from mlxstack.core.status import CacheView, MissSums, MissView, PrefixView

app = VerbApp(help="Inspect and manage the KV cache. Without a verb: the status.")

Watch = Annotated[bool, typer.Option("--watch", help="Refresh every two seconds.")]
PrefixName = Annotated[str, typer.Argument(help="The name of the prefix.")]
WATCH_S = 2.0


@app.without_verb
@app.command()
def status(service: ServiceOptions, json: Json = False, watch: Watch = False) -> None:
    """Show budget, entries, hit rates and top prefixes."""
    while True:
        view = _look(service)
        as_json(view) if json else say(render(view))
        if not watch:
            return
        time.sleep(WATCH_S)


@app.command()
def top(service: ServiceOptions) -> VerbResult:
    """List pinned and the most used prefixes."""
    prefixes = _look(service).prefixes
    headings = ("NAME", "HITS", "TOKENS", "SIZE", "AGE", "PINNED")
    return VerbResult(prefixes, lambda: table(headings, map(_row, prefixes)))


@app.command()
def why(
    request: Annotated[str, typer.Argument(help="A request id, or an agent.")],
    service: ServiceOptions,
) -> VerbResult:
    """Show how much a request reused, and the reason for the rest."""
    from mlxstack.core.status import RequestView

    path = path_of("requests", request)
    found = service.ask(lambda client: client.get(path, RequestView))
    lines = [f"{found.id}: {found.n_cached} of {found.n_prompt} prompt tokens reused"]
    if found.n_begun_early:
        lines.append(f"begun early: {found.n_begun_early} tokens, used {found.n_used_early}")
    lines.append(_reason(found.miss) if found.miss else "no miss")
    return VerbResult(found, "\n".join(lines))


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
    return VerbResult(done, f"{prefix}: {done['n_tokens']} tokens are kept")


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


def render(view: "CacheView") -> str:
    """Status as text."""
    disk = f"   (disk {size(view.disk_bytes)}{_of(view.disk_budget)})"
    hour = view.hour
    lines = [
        "Prefix Cache Status" if view.is_enabled else "Prefix Cache Status: switched off",
        f"  Memory allocated: {size(view.memory_bytes)}{_of(view.memory_budget)} budget{disk}",
        f"  Entries: {view.n_entries}",
        f"  Hit rate (last hour): {share(hour.n_hits, hour.n_requests)}"
        f"   (tokens {share(hour.n_cached, hour.n_prompt)})",
        f"  Avg TTFT reduction: {share(hour.saved_s, hour.saved_s + hour.ttft_s)}",
        "",
        "Top cached prefixes:",
    ]
    lines += [_line(prefix) for prefix in view.prefixes] or ["  none yet"]
    if view.losses:
        lines += ["", "Misses since the start:", *(_sums(sums) for sums in view.losses)]
    lost = sorted((one for one in view.misses if one.n_lost), key=lambda one: -one.lost_s)
    if costly := lost[:5]:
        lines += ["", "Last misses, the costliest first:", *(f"  {_reason(m)}" for m in costly)]
    return "\n".join(lines)


def _look(service: ServiceOptions) -> "CacheView":
    from mlxstack.core.status import CacheView

    return service.ask(lambda client: client.get("/cache", CacheView))


def _row(prefix: "PrefixView") -> tuple[object, ...]:
    is_pinned = "yes" if prefix.is_pinned else "-"
    return (
        _title(prefix),
        prefix.n_hits,
        prefix.n_tokens,
        size(prefix.n_bytes),
        age(prefix.age_s),
        is_pinned,
    )


def _line(prefix: "PrefixView") -> str:
    return (
        f"  {_title(prefix):<24} hits: {prefix.n_hits:<8,} tokens: {prefix.n_tokens:<8,}"
        f" size: {size(prefix.n_bytes):<9} age: {age(prefix.age_s)}"
    )


def _title(prefix: "PrefixView") -> str:
    """Name of a pinned prefix, else its first words, as in the dashboard."""
    return printable(prefix.name or prefix.opening or f"({prefix.n_tokens} tokens)", MOST_CHARS)


def _sums(sums: "MissSums") -> str:
    return f"  {sums.reason:<24} {sums.n_misses:<8,} {_cost(sums.n_lost, sums.lost_s)}"


def _reason(miss: "MissView") -> str:
    who, cost = miss.agent or miss.request, _cost(miss.n_lost, miss.lost_s)
    if miss.at is None:
        return f"{who}: {miss.reason}; {cost}"
    where = f"{who}: {miss.reason} at token {miss.at}"
    if not miss.n_lost:
        return f"{where}; {cost}"
    texts = f"{miss.text_sent[:40]!r} instead of {miss.text_cached[:40]!r}"
    return f"{where}, after {miss.text_shared[-40:]!r}: {texts}; {cost}"


def _cost(n_lost: int, lost_s: float) -> str:
    return f"lost {n_lost:,} tokens, {lost_s:.1f} s" if n_lost else "lost nothing"


def _of(budget: int | None) -> str:
    return "" if budget is None else f" / {size(budget)}"
