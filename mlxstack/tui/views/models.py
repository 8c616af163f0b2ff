"""Models of an address: their state, memory and requests."""

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.client.types import ListedModel
from mlxstack.core.formatting import NONE, age, printable, size
from mlxstack.host.coding_clients import is_large_enough
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.overview import is_active
from mlxstack.tui.views.table_data import (
    CellStyle,
    Column,
    DrawContext,
    Line,
    TableData,
    TextCell,
    number,
    tabulated,
    title,
    warned,
)

STYLES = {
    "loaded": CellStyle.GOOD,
    "loading": CellStyle.BUSY,
    "unloading": CellStyle.BUSY,
    "unloaded": CellStyle.FAINT,
    "ok": CellStyle.GOOD,
    "swapping": CellStyle.BUSY,
    "stopping": CellStyle.BUSY,
}


class ModelRow(Struct, frozen=True):
    """Model of an address, as it is listed."""

    id: str
    state: str
    progress: str
    """State, and how far it is."""
    n_bytes: int | None
    fits: bool
    """Whether this machine has so much memory."""
    n_ctx: int
    n_requests: int
    n_waiting: int
    idle_s: float | None
    n_active: int = 0
    n_slots: int = 0
    """Slots, of which `n_active` are busy; 0: unknown."""


def _memory(row: ModelRow, _: DrawContext) -> TextCell:
    if row.n_bytes is None:
        return TextCell(NONE)
    return TextCell(size(row.n_bytes), CellStyle.PLAIN if row.fits else CellStyle.BAD)


def _slots(row: ModelRow, _: DrawContext) -> TextCell:
    if not row.n_slots:
        return TextCell(NONE)
    return TextCell(f"{row.n_active}/{row.n_slots}")


def _waiting(row: ModelRow, _: DrawContext) -> TextCell:
    return warned(str(row.n_waiting), row.n_waiting > 0, CellStyle.FAINT)


MODELS: tuple[Column[ModelRow], ...] = (
    Column("model", 12, lambda row, _: TextCell(printable(row.id, 60)), grows=True),
    Column(
        "state", 11, lambda row, _: TextCell(row.progress, STYLES.get(row.state, CellStyle.BAD))
    ),
    Column("memory", 9, _memory, lambda row: row.n_bytes, is_right=True),
    number("context", 7, lambda row: row.n_ctx),
    Column("slots", 5, _slots, lambda row: row.n_active if row.n_slots else None, is_right=True),
    number("requests", 8, lambda row: row.n_requests, str),
    Column("waiting", 7, _waiting, lambda row: row.n_waiting, is_right=True),
    number("idle", 6, lambda row: row.idle_s, age),
)


def models(model: DashboardState, width: int) -> TableData:
    """Members of a gateway, or the one model of a service."""
    listed = members(model)
    rows = [_member(member, model) for member in listed]
    summary = ""
    if rows:
        n_loaded = sum(row.state == "loaded" for row in rows)
        summary = f"{n_loaded} of {len(rows)} loaded, enter shows one"
    elif model.frame.service.model:
        rows = [_single_model(model)]
        summary = "one; `mlx-stack up A B` serves several"
    pairs = [(row.id, row) for row in rows]
    context = DrawContext(model, width)
    return tabulated(title("Models", summary), MODELS, pairs, context, "No model is known yet.")


def members(model: DashboardState) -> tuple[ListedModel, ...]:
    """Members of a gateway; none of a service with one model."""
    return tuple(listed for listed in model.models if listed.status)


def details(member: ListedModel) -> tuple[Line, ...]:
    """Details of a member, and the commands that use it."""
    name = printable(member.id, 60)
    memory = size(member.n_bytes)
    if not member.fits:
        memory += ", more than this machine has"
    facts = (
        ("state", _state(member) or NONE),
        ("memory", memory),
        ("stays", member.resident or NONE),
        ("context", f"{member.max_input_tokens} tokens per slot"),
        ("other names", printable(", ".join(member.aliases), 60) or NONE),
        ("requests", f"{member.n_requests}, {member.n_active} now, {member.n_waiting} waiting"),
    )
    commands = [f"mlx-stack chat {name}"]
    if is_large_enough("claude", member.max_input_tokens):
        commands.append(f"mlx-stack run claude --name {name}")
    return (
        (TextCell(name, CellStyle.STRONG),),
        *((TextCell(f"  {label:<12} ", CellStyle.FAINT), TextCell(v)) for label, v in facts),
        (),
        *((TextCell(f"  {command}", CellStyle.BUSY),) for command in commands),
    )


def _state(member: ListedModel) -> str:
    return member.status.value if member.status else ""


def _member(member: ListedModel, model: DashboardState) -> ModelRow:
    state = _state(member)
    row = ModelRow(
        member.id,
        state,
        state,
        member.n_bytes,
        member.fits,
        member.max_input_tokens,
        member.n_requests,
        member.n_waiting,
        member.idle_s,
    )
    if member.id != model.frame.service.model:
        return row
    row = replace(row, progress=_progress(state, model))
    if state != "loaded":
        return row
    slots = model.frame.snapshot.slots
    return replace(row, n_active=sum(map(is_active, slots)), n_slots=len(slots))


def _single_model(model: DashboardState) -> ModelRow:
    """Row of a service without a gateway, from its frame."""
    frame = model.frame
    last = next(iter(frame.requests or ()), None)
    return ModelRow(
        frame.service.model,
        frame.service.health,
        _progress(frame.service.health, model),
        _used_bytes(model),
        fits=True,
        n_ctx=frame.service.n_ctx,
        n_requests=frame.snapshot.counters.n_requests,
        n_waiting=len(frame.snapshot.waiting),
        idle_s=last.age_s if last else None,
        n_active=sum(map(is_active, frame.snapshot.slots)),
        n_slots=len(frame.snapshot.slots),
    )


def _used_bytes(model: DashboardState) -> int | None:
    memory = model.frame.memory
    if memory is None:
        return None
    kv = memory.live_bytes + memory.parked_bytes
    return memory.weights_bytes + kv + memory.workspace_bytes


def _progress(state: str, model: DashboardState) -> str:
    """State, with the loaded share of a loading model."""
    loading = model.frame.loading
    if loading is None or not loading.n_total or state not in {"loading", "swapping"}:
        return state
    return f"{state} {100 * loading.n_done // loading.n_total}%"[:12]
