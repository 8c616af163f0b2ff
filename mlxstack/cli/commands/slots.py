"""`slots`: list, save, restore and erase the slots of a running service."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxstack.cli.commands import gc as sweeps
from mlxstack.cli.commands.cache import labels
from mlxstack.cli.commands.gc import DryRun, MaxBytes, OfAgent, OlderThan
from mlxstack.cli.output import table
from mlxstack.cli.service_request import ServiceOptions
from mlxstack.cli.streams import finishes
from mlxstack.cli.verbs import VerbApp, VerbResult
from mlxstack.core.formatting import age, count, short_time, size, tokens

if TYPE_CHECKING:
    from mlxstack.client.client import Client
    from mlxstack.client.types import SlotResponse

app = VerbApp(help="List, save, restore and erase slots. Without a verb: the list.")

SlotId = Annotated[int, typer.Argument(help="The slot's number, from 0.")]
FileName = Annotated[str, typer.Argument(help="A file name in the preset's slots.save_path.")]


@app.without_verb
@app.command("list")
def show(service: ServiceOptions) -> VerbResult:
    """List slots and their contexts."""
    slots = service.ask(lambda client: client.slots())
    return VerbResult({"slots": slots}, lambda: _show(slots, labels(service)))


@app.command()
@finishes()
def save(slot: SlotId, filename: FileName, service: ServiceOptions) -> VerbResult:
    """Write the context of a slot to a file."""
    done = service.ask(lambda client: _save(client, slot, filename))
    text = f"slot {slot}: {count(done['n_saved'])} tokens saved to {filename}"
    took = f"{size(done['n_written'])} written in {short_time(done['timings']['save_ms'] / 1000)}"
    return VerbResult(done, f"{text}, {took}")


async def _save(client: "Client", slot: int, filename: str) -> dict[str, Any]:
    """Save a slot. Raises Conflict for an empty one."""
    from mlxstack.core.errors import Conflict

    for view in await client.slots():
        if view.id == slot and not (view.n_tokens or view.is_processing):
            raise Conflict(f"slot {slot} is empty: there is nothing to save")
    return await client.post(f"/slots/{slot}?action=save", {"filename": filename})


@app.command()
@finishes()
def restore(slot: SlotId, filename: FileName, service: ServiceOptions) -> VerbResult:
    """Load the context of a file into a slot."""
    done = service.post(f"/slots/{slot}?action=restore", {"filename": filename})
    text = f"slot {slot}: {count(done['n_restored'])} tokens restored from {filename}"
    took = f"{size(done['n_read'])} read in {short_time(done['timings']['restore_ms'] / 1000)}"
    return VerbResult(done, f"{text}, {took}")


@app.command()
@finishes()
def erase(slot: SlotId, service: ServiceOptions) -> VerbResult:
    """Empty a slot."""
    done = service.post(f"/slots/{slot}?action=erase", {})
    return VerbResult(done, f"slot {slot}: {count(done['n_erased'])} tokens erased")


@app.command()
@finishes()
def gc(
    service: ServiceOptions,
    max_bytes: MaxBytes = None,
    older_than: OlderThan = None,
    agent: OfAgent = None,
    dry_run: DryRun = False,
) -> VerbResult:
    """Delete saved slots and agents' KV by age and bytes.

    KV that only they needed is deleted too.
    """
    from mlxstack.core.commands import CollectGarbage

    sweep = CollectGarbage(max_bytes, older_than, agent=agent, is_dry=dry_run)
    return sweeps.collect(sweep, service)


def _show(slots: "list[SlotResponse]", names: dict[str, str]) -> None:
    headings = ("SLOT", "STATE", "AGENT", "TOKENS", "CONTEXT", "REUSED", "TOKENS/S", "IDLE")
    least = ("REUSED", "TOKENS/S", "CONTEXT", "IDLE")
    table(headings, [_row(slot, names) for slot in slots], least)


def _row(slot: "SlotResponse", names: dict[str, str]) -> tuple[object, ...]:
    return (
        slot.id,
        (slot.state or "busy") if slot.is_processing else "idle",
        names.get(slot.agent or "", slot.agent) or "-",
        count(slot.n_tokens),
        tokens(slot.n_ctx),
        count(slot.cached_tokens),
        f"{slot.tps:.1f}" if slot.tps else "-",
        "-" if slot.is_processing else age(slot.idle_s),
    )
