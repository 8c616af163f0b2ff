"""Actions on a slot: save, restore, erase, copy the curl command."""

import shlex
from functools import partial

from mlxstack.core.formatting import count, short_time, size
from mlxstack.tui.actions.action import ActionContext, ActionInput, ActionTarget, Aim, action
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.names import agent_name

KEY_VARIABLE = "MLX_STACK_API_KEY"


def filename_of(model: DashboardState, key: str) -> str:
    """Propose a file name for a slot, after its agent."""
    agent = next((v.agent for v in model.frame.snapshot.slots if str(v.id) == key), None)
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in agent or "")
    return f"{safe.strip('.-') or f'slot-{key}'}.kv"


def _slot(model: DashboardState, key: str) -> str:
    view = next((v for v in model.frame.snapshot.slots if str(v.id) == key), None)
    if view is None:
        return f"slot {key}"
    name = f"slot {key}"
    if view.agent:
        name += f" of {agent_name(model, view.agent)}"
    return f"{name}, {count(view.n_tokens)} tokens"


on_slot = partial(action, ActionTarget.SLOT, _slot)


@on_slot("S", "Save", "Save {} to which file?", wants=ActionInput.FILENAME)
async def save(context: ActionContext, aim: Aim) -> str:
    """Write the context of the chosen slot to a slot file."""
    done = await context.calls.post(f"/slots/{aim.key}?action=save", {"filename": aim.text})
    took = short_time(done["timings"]["save_ms"] / 1000)
    news = f"{size(done['n_written'])} written of {size(done['n_bytes'])} in {took}"
    return f"slot {aim.key}: {done['n_saved']} tokens saved to {done['filename']}, {news}"


@on_slot(
    "R", "Restore", "Replace {} by which file?", wants=ActionInput.FILENAME, is_destructive=True
)
async def restore(context: ActionContext, aim: Aim) -> str:
    """Replace the context of the chosen slot by the one in a slot file."""
    done = await context.calls.post(f"/slots/{aim.key}?action=restore", {"filename": aim.text})
    news = f"{size(done['n_read'])} read in {short_time(done['timings']['restore_ms'] / 1000)}"
    return f"slot {aim.key}: {done['n_restored']} tokens restored from {done['filename']}, {news}"


@on_slot("E", "Erase", "Erase {}? They must be computed again.", is_destructive=True)
async def erase(context: ActionContext, aim: Aim) -> str:
    """Empty the chosen slot."""
    done = await context.calls.post(f"/slots/{aim.key}?action=erase", {})
    return f"slot {aim.key}: {done['n_erased']} tokens erased"


@on_slot("c", "Copy curl", "Copy the curl that saves {}.", wants=ActionInput.NOTHING)
async def copy_curl(context: ActionContext, aim: Aim) -> str:
    """Copy the curl command that saves the chosen slot."""
    url = shlex.quote(f"{context.calls.url}/slots/{aim.key}?action=save")
    body = shlex.quote(f'{{"filename": "slot-{aim.key}.kv"}}')
    key = f'-H "Authorization: Bearer ${KEY_VARIABLE}"'
    command = f"curl -sS {url} {key} -d {body}"
    context.copy(command)
    return f"copied: {command}"


ACTIONS = (save, restore, erase, copy_curl)
