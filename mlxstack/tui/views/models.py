"""Models of an address: their state, memory and requests."""

from mlxstack.client.types import ListedModel
from mlxstack.core.formatting import NONE, age, count, printable, size
from mlxstack.host.coding_clients import is_large_enough
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.overview import is_active
from mlxstack.tui.views.table_data import (
    CellStyle,
    Line,
    TableData,
    TableRow,
    TextCell,
    tabulated,
    title,
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


def models(model: DashboardState, width: int) -> TableData:
    """Members of a gateway, or the one model of a service."""
    columns = (
        "model *12, state 11, memory >9, context >7, slots >5, requests >8, waiting >7, idle >6"
    )
    found = members(model)
    if found:
        rows = [TableRow(one.id, _member(one, model)) for one in found]
        n_loaded = sum(one.status is not None and one.status.value == "loaded" for one in found)
        told = f"{n_loaded} of {len(found)} loaded, enter shows one"
    else:
        rows = [_one_model(model)] if model.frame.service.model else []
        told = "one; `mlx-stack up A B` serves several" if rows else ""
    return tabulated(title("Models", told), columns, rows, width, "No model is known yet.")


def members(model: DashboardState) -> tuple[ListedModel, ...]:
    """Members of a gateway; none of a service with one model."""
    return tuple(one for one in model.models if one.status)


def details(one: ListedModel) -> tuple[Line, ...]:
    """Details of a member, and the commands that use it."""
    name = printable(one.id, 60)
    facts = (
        ("state", one.status.value if one.status else NONE),
        ("memory", f"{size(one.n_bytes)}{'' if one.fits else ', more than this machine has'}"),
        ("stays", one.resident or NONE),
        ("context", f"{one.max_input_tokens} tokens per slot"),
        ("other names", printable(", ".join(one.aliases), 60) or NONE),
        ("requests", f"{one.n_requests}, {one.n_active} now, {one.n_waiting} waiting"),
    )
    commands = [f"mlx-stack chat {name}"]
    if is_large_enough("claude", one.max_input_tokens):
        commands.append(f"mlx-stack run claude --name {name}")
    return (
        (TextCell(name, CellStyle.STRONG),),
        *((TextCell(f"  {k:<12} ", CellStyle.FAINT), TextCell(v)) for k, v in facts),
        (),
        *((TextCell(f"  {command}", CellStyle.BUSY),) for command in commands),
    )


def _member(one: ListedModel, model: DashboardState) -> tuple[TextCell, ...]:
    state = one.status.value if one.status else ""
    is_watched = one.id == model.frame.service.model
    shown = _progress(state, model) if is_watched else state
    return (
        TextCell(printable(one.id, 60)),
        TextCell(shown, STYLES.get(state, CellStyle.BAD)),
        TextCell(size(one.n_bytes), CellStyle.PLAIN if one.fits else CellStyle.BAD),
        TextCell(count(one.max_input_tokens)),
        TextCell(_slots(model) if is_watched and state == "loaded" else NONE),
        TextCell(str(one.n_requests)),
        TextCell(str(one.n_waiting), CellStyle.WARN if one.n_waiting else CellStyle.FAINT),
        TextCell(NONE if one.idle_s is None else age(one.idle_s)),
    )


def _one_model(model: DashboardState) -> TableRow:
    """Row of a service without a gateway, from its frame."""
    frame = model.frame
    state = frame.service.health
    n_waiting = len(frame.snapshot.waiting)
    last = next(iter(frame.requests or ()), None)
    cells = (
        TextCell(printable(frame.service.model, 60)),
        TextCell(_progress(state, model), STYLES.get(state, CellStyle.BAD)),
        TextCell(_used(model)),
        TextCell(count(frame.service.n_ctx)),
        TextCell(_slots(model)),
        TextCell(str(frame.snapshot.counters.n_asks)),
        TextCell(str(n_waiting), CellStyle.WARN if n_waiting else CellStyle.FAINT),
        TextCell(NONE if last is None else age(last.age_s)),
    )
    return TableRow(frame.service.model, cells)


def _used(model: DashboardState) -> str:
    memory = model.frame.memory
    if memory is None:
        return NONE
    kv = memory.live_bytes + memory.parked_bytes
    return size(memory.weights_bytes + kv + memory.workspace_bytes)


def _progress(state: str, model: DashboardState) -> str:
    """State, with the loaded share of a loading model."""
    loading = model.frame.loading
    if loading is None or not loading.n_total or state not in {"loading", "swapping"}:
        return state
    return f"{state} {100 * loading.n_done // loading.n_total}%"[:12]


def _slots(model: DashboardState) -> str:
    slots = model.frame.snapshot.slots
    if slots:
        return f"{sum(map(is_active, slots))}/{len(slots)}"
    return NONE
