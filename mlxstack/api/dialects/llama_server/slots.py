"""Slots as llama-server shows them, and the slot actions."""

import re
from typing import Any

import msgspec
from litestar import get, post
from litestar.params import FromPath, FromQuery
from msgspec import Struct, structs

from mlxstack.api.dialects.llama_server.response_schema import request_params
from mlxstack.api.disconnect import cancel_on_disconnect
from mlxstack.api.guards import OF_ALL, UNLOADED, can_access, is_unscoped
from mlxstack.api.request_body import decode_body
from mlxstack.api.run_generation import AnyRequest, TheService
from mlxstack.core.commands import EraseSlot, RestoreSlot, SaveSlot, SlotCommand, SlotCommandResult
from mlxstack.core.errors import BadRequest, Busy
from mlxstack.service.parts.request_log import SlotStatus

OPEN = ("id", "n_ctx", "speculative", "is_processing")
TASK = re.compile(r"[-_]([0-9a-f]{7})")
RENAMED = {"slot": "id_slot", "name": "filename"}


class FileBody(Struct):
    """Names the slot file."""

    filename: str


@get("/slots", opt=UNLOADED)
async def list_slots(
    request: AnyRequest, service: TheService, fail_on_no_slot: FromQuery[str | None] = None
) -> list[dict[str, Any]]:
    """All slots; `?fail_on_no_slot` gives 503 when none is idle."""
    snapshot = service.engine.snapshot()
    slots = service.request_log.slots(snapshot)
    if fail_on_no_slot not in (None, "", "0") and all(slot.is_processing for slot in slots):
        raise Busy("no slot available")
    return [_seen(request, _slot(slot, snapshot.is_drafting)) for slot in slots]


@post("/slots/{slot:str}", status_code=200, opt=OF_ALL)
async def act_on_slot(
    request: AnyRequest,
    service: TheService,
    slot: FromPath[str],
    action: FromQuery[str | None] = None,
) -> dict[str, Any]:
    """`?action=save|restore|erase`, with {"filename"} for the first two; waits until the slot is
    idle.
    """
    number = _number(slot)
    command: SlotCommand
    match action:
        case "save":
            command = SaveSlot(number, await _filename(request))
        case "restore":
            command = RestoreSlot(number, await _filename(request))
        case "erase":
            command = EraseSlot(number)
        case _:
            raise BadRequest("Invalid action: it must be save, restore or erase", "action")
    return _done(await cancel_on_disconnect(request, service.run_slot_command(command)))


def _done(result: SlotCommandResult) -> dict[str, Any]:
    """Result in llama-server's fields, times apart."""
    fields = {RENAMED.get(key, key): value for key, value in structs.asdict(result).items()}
    times = {key: fields.pop(key) for key in tuple(fields) if key.endswith("_ms")}
    if times:
        fields["timings"] = times
    return fields


def _seen(request: AnyRequest, slot: dict[str, Any]) -> dict[str, Any]:
    """Hide other agents' slots, except their state, from a scoped key."""
    agent = slot["agent"]
    if is_unscoped(request) or (agent is not None and can_access(request, agent)):
        return slot
    return {name: slot[name] for name in OPEN}


def _number(slot: str) -> int:
    try:
        return int(slot)
    except ValueError:
        raise BadRequest(f"Invalid slot ID: {slot!r} is not a number", "id_slot") from None


async def _filename(request: AnyRequest) -> str:
    try:
        return decode_body(await request.body() or b"{}", FileBody).filename
    except msgspec.ValidationError as error:
        raise BadRequest(f"filename: {error}", "filename") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None


def _slot(slot: SlotStatus, is_speculative: bool) -> dict[str, Any]:
    view = slot.view
    head = {
        "id": view.id,
        "n_ctx": view.n_ctx,
        "speculative": is_speculative,
        "is_processing": slot.is_processing,
    }
    fields = {**head, **_ours(slot)}
    if view.is_used or view.n_tokens:
        fields |= _last(slot)
    return fields


def _last(slot: SlotStatus) -> dict[str, Any]:
    """Fields that llama-server adds once a slot has been used."""
    view = slot.view
    n_remain = -1
    n_decoded = 0
    if slot.is_processing:
        n_remain = view.n_remain
        n_decoded = view.n_decoded
    return {
        "id_task": _task(view.request),
        "n_prompt_tokens": view.n_tokens,
        "n_prompt_tokens_processed": max(0, view.n_done - view.n_cached),
        "n_prompt_tokens_cache": view.n_cached,
        "params": request_params(slot.last) if slot.last else {},
        "next_token": [
            {
                "has_next_token": slot.is_processing,
                "has_new_line": False,
                "n_remain": n_remain,
                "n_decoded": n_decoded,
            }
        ],
    }


def _ours(slot: SlotStatus) -> dict[str, Any]:
    view = slot.view
    return {
        "state": view.state.value if view.state else "idle",
        "request": view.request,
        "agent": view.agent,
        "priority": view.priority.name.lower(),
        "turn_kind": view.turn_kind.value,
        "n_tokens": view.n_tokens,
        "n_prompt": view.n_prompt,
        "n_done": view.n_done,
        "cached_tokens": view.n_cached,
        "tps": view.tps,
        "draft_n": view.n_drafted,
        "draft_n_accepted": view.n_accepted,
        "n_bytes": view.n_bytes,
        "idle_s": view.idle_s,
        "miss_reason": view.miss.reason if view.miss else None,
        "n_early": view.n_early,
        "n_early_left": view.n_early_left,
    }


def _task(request: str | None) -> int:
    """Task number of a request id, as llama-server has one."""
    match = TASK.search(request or "")
    return int(match[1], 16) if match else -1
