"""`cache gc` and `slots gc`: delete stored KV by age and bytes."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.output import as_json, note
from mlxstack.core.formatting import size

if TYPE_CHECKING:
    from mlxstack.core.commands import CollectGarbage, GCResult
    from mlxstack.host.home import Home

MaxBytes = Annotated[
    str | None, typer.Option("--max-bytes", help="Keep at most this much: 500MB, 20GB.")
]
OlderThan = Annotated[
    str | None, typer.Option("--older-than", help="Delete files not used for this long: 36h, 30d.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be deleted; delete nothing.")
]
OfAgent = Annotated[
    str | None, typer.Option("--agent", help="Delete only files that this agent alone uses.")
]


def bounds(max_bytes: str | None, older_than: str | None) -> "CollectGarbage":
    """Bounds of the options. Raises Misuse."""
    from mlxstack.cli.units import bytes_of, seconds_of
    from mlxstack.core.commands import CollectGarbage

    return CollectGarbage(
        max_bytes=None if max_bytes is None else bytes_of(max_bytes),
        max_age_s=None if older_than is None else seconds_of(older_than),
    )


def collect(sweep: "CollectGarbage", name: str | None, url: str | None) -> "GCResult":
    """Collect by the running service, which knows open files, else here."""
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    if url is None:
        name = name or _keeper(home)
    return _sweep_here(sweep, home) if name is None and url is None else _request(sweep, name, url)


def show(swept: "GCResult", json: bool) -> None:
    """Print deleted files, or those of a dry run."""
    if json:
        as_json(swept)
        return
    for victim in swept.victims:
        typer.echo(f"{size(victim.n_bytes):>10}  {victim.reason:<6} {victim.title}")
    n_bytes = sum(victim.n_bytes for victim in swept.victims)
    verb = "would be deleted" if swept.is_dry else "deleted"
    left = f"{size(swept.n_after)} of {size(swept.n_before)} remain"
    typer.echo(f"{len(swept.victims)} files, {size(n_bytes)} {verb}; {left}")
    for line in swept.skipped:
        note(f"kept {line}")


def _keeper(home: "Home") -> str | None:
    """Name of a running service with KV, which embedding services have not."""
    from mlxstack.core.preset import Preset, ServiceKind
    from mlxstack.host import services
    from mlxstack.host.services import read_json

    for state in services.running(home):
        preset = read_json(home.preset_file(state.plan.name), Preset)
        if preset is None or preset.kind is ServiceKind.CHAT:
            return state.plan.name
    return None


def _sweep_here(sweep: "CollectGarbage", home: "Home") -> "GCResult":
    from mlxstack.core.preset import DiskSpec
    from mlxstack.store.agent_history import AgentFolders
    from mlxstack.store.disk_quota import QuotaKVStore
    from mlxstack.store.kv_store import DiskKVStore

    store = QuotaKVStore(DiskKVStore(home.kv), AgentFolders(home.agents), DiskSpec())
    return store.sweep(sweep, frozenset())


def _request(sweep: "CollectGarbage", name: str | None, url: str | None) -> "GCResult":
    import msgspec

    from mlxstack.cli.service_request import call_service
    from mlxstack.core.commands import GCResult

    body = msgspec.to_builtins(sweep)
    return msgspec.convert(
        call_service(name, url, lambda client: client.post("/cache/gc", body)), GCResult
    )
