"""`cache gc` and `slots gc`: delete stored KV by age and bytes."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.output import note, say
from mlxstack.cli.service_request import ServiceOptions
from mlxstack.cli.units import bytes_of, seconds_of
from mlxstack.cli.verbs import VerbResult
from mlxstack.core.formatting import size

if TYPE_CHECKING:
    from mlxstack.core.commands import CollectGarbage, GCResult
    from mlxstack.host.home import Home

MaxBytes = Annotated[
    int | None,
    typer.Option(metavar="SIZE", parser=bytes_of, help="Keep at most this much: 500MB, 20GB."),
]
OlderThan = Annotated[
    float | None,
    typer.Option(
        metavar="TIME", parser=seconds_of, help="Delete files not used for this long: 36h, 30d."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be deleted; delete nothing.")
]
OfAgent = Annotated[
    str | None, typer.Option("--agent", help="Delete only files that this agent alone uses.")
]


def collect(sweep: "CollectGarbage", service: ServiceOptions) -> VerbResult:
    """Collect by the running service, which knows open files, else here."""
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    if service == ServiceOptions():
        service = ServiceOptions(_keeper(home))
    is_here = service == ServiceOptions()
    swept = _sweep_here(sweep, home) if is_here else _request(sweep, service)
    return VerbResult(swept, lambda: _show(swept))


def _show(swept: "GCResult") -> None:
    """Print deleted files, or those of a dry run."""
    for victim in swept.victims:
        say(f"{size(victim.n_bytes):>10}  {victim.reason:<6} {victim.title}")
    n_bytes = sum(victim.n_bytes for victim in swept.victims)
    verb = "deleted"
    if swept.is_dry:
        verb = "would be deleted"
    left = f"{size(swept.n_after)} of {size(swept.n_before)} remain"
    say(f"{len(swept.victims)} files, {size(n_bytes)} {verb}; {left}")
    for line in swept.skipped:
        note(f"kept {line}")


def _keeper(home: "Home") -> str | None:
    """Name of a running service with KV, which embedding services have not."""
    from mlxstack.core.preset import Preset, ServiceKind
    from mlxstack.host import services
    from mlxstack.host.services import read_json

    for state in services.running(home):
        preset = read_json(home.preset_file(state.spec.name), Preset)
        if preset is None or preset.kind is ServiceKind.CHAT:
            return state.spec.name
    return None


def _sweep_here(sweep: "CollectGarbage", home: "Home") -> "GCResult":
    from mlxstack.core.preset import DiskSpec
    from mlxstack.store.agent_history import AgentFolders
    from mlxstack.store.disk_quota import QuotaKVStore
    from mlxstack.store.kv_store import DiskKVStore

    store = QuotaKVStore(DiskKVStore(home.kv), AgentFolders(home.agents), DiskSpec(max_bytes=None))
    return store.sweep(sweep, frozenset())


def _request(sweep: "CollectGarbage", service: ServiceOptions) -> "GCResult":
    import msgspec

    from mlxstack.core.commands import GCResult

    return msgspec.convert(service.post("/cache/gc", msgspec.to_builtins(sweep)), GCResult)
