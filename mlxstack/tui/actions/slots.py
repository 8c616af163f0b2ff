"""Actions on a slot: save, restore, erase, copy the curl command."""

import shlex

from mlxstack.core.formatting import short_time, size
from mlxstack.tui.actions.action import Action, ActionContext, ActionInput, ActionTarget, Aim
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.formatting import tokens
from mlxstack.tui.views.names import agent_name

KEY_VARIABLE = "MLX_STACK_API_KEY"


def filename_of(model: DashboardState, key: str) -> str:
    """Propose a file name for a slot, after its agent."""
    agent = next((v.agent for v in model.frame.snapshot.slots if str(v.id) == key), None)
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in agent or "")
    return f"{safe.strip('.-') or f'slot-{key}'}.kv"


async def save(context: ActionContext, aim: Aim) -> str:
    """Save the slot once it is idle."""
    done = await context.calls.save_slot(int(aim.key), aim.text)
    took = short_time(done.timings.get("save_ms", 0.0) / 1000)
    news = f"{size(done.n_written)} written of {size(done.n_bytes)}"
    return f"slot {aim.key}: {done.n_saved} tokens saved to {done.filename}, {news} in {took}"


async def restore(context: ActionContext, aim: Aim) -> str:
    """Restore the slot once it is idle."""
    done = await context.calls.restore_slot(int(aim.key), aim.text)
    took = short_time(done.timings.get("restore_ms", 0.0) / 1000)
    news = f"{size(done.n_read)} read in {took}"
    return f"slot {aim.key}: {done.n_restored} tokens restored from {done.filename}, {news}"


async def erase(context: ActionContext, aim: Aim) -> str:
    """Erase the slot once it is idle."""
    done = await context.calls.erase_slot(int(aim.key))
    return f"slot {aim.key}: {done.n_erased} tokens erased"


async def copy_curl(context: ActionContext, aim: Aim) -> str:
    """Copy the save command; the API key stays a variable reference."""
    url = shlex.quote(f"{context.calls.url}/slots/{aim.key}?action=save")
    body = shlex.quote(f'{{"filename": "slot-{aim.key}.kv"}}')
    key = f'-H "Authorization: Bearer ${KEY_VARIABLE}"'
    command = f"curl -sS {url} {key} -d {body}"
    context.copy(command)
    return f"copied: {command}"


def _slot(model: DashboardState, key: str) -> str:
    view = next((v for v in model.frame.snapshot.slots if str(v.id) == key), None)
    if view is None:
        return f"slot {key}"
    who = f" of {agent_name(model, view.agent)}" if view.agent else ""
    return f"slot {key}{who}, {tokens(view.n_tokens)} tokens"


ACTIONS: tuple[Action, ...] = (
    Action(
        id="save",
        key="S",
        label="Save",
        help="Write the context of the chosen slot to a slot file.",
        target=ActionTarget.SLOT,
        wants=ActionInput.FILENAME,
        describe=lambda model, key: f"Save {_slot(model, key)} to which file?",
        do=save,
    ),
    Action(
        id="restore",
        key="R",
        label="Restore",
        help="Replace the context of the chosen slot by the one in a slot file.",
        target=ActionTarget.SLOT,
        wants=ActionInput.FILENAME,
        describe=lambda model, key: f"Replace {_slot(model, key)} by which file?",
        is_destructive=True,
        do=restore,
    ),
    Action(
        id="erase",
        key="E",
        label="Erase",
        help="Empty the chosen slot.",
        target=ActionTarget.SLOT,
        describe=lambda model, key: f"Erase {_slot(model, key)}? They must be computed again.",
        is_destructive=True,
        do=erase,
    ),
    Action(
        id="copy_curl",
        key="c",
        label="Copy curl",
        help="Copy the curl command that saves the chosen slot.",
        target=ActionTarget.SLOT,
        wants=ActionInput.NOTHING,
        describe=lambda model, key: f"Copy the curl that saves {_slot(model, key)}.",
        do=copy_curl,
    ),
)
