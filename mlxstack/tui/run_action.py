"""Runs an action: question before, call, notification after."""

from functools import partial

from msgspec import Struct
from textual.app import App

from mlxstack.core.errors import StackError
from mlxstack.core.formatting import printable
from mlxstack.core.request import Priority
from mlxstack.tui.actions.action import (
    Action,
    ActionContext,
    ActionInput,
    ActionTarget,
    Aim,
    LocalActions,
    ServiceCalls,
)
from mlxstack.tui.actions.slots import filename_of
from mlxstack.tui.screens.dialogs import ChoiceDialog, ConfirmDialog, Question, TextDialog
from mlxstack.tui.state import DashboardState


class PendingAction(Struct, frozen=True):
    """An action on one target; `holder` is its occupant when asked."""

    action: Action
    calls: ServiceCalls
    key: str
    holder: str | None
    machine: LocalActions | None = None


PRIORITIES = tuple(one.name.lower() for one in Priority)


def holder(model: DashboardState, action: Action, key: str) -> str | None:
    """Owner of the slot's context: agent or request; None without slot."""
    if action.target is not ActionTarget.SLOT:
        return None
    slot = next((one for one in model.frame.snapshot.slots if str(one.id) == key), None)
    return (slot.agent or slot.request) if slot else None


def question(pending: PendingAction, model: DashboardState) -> Question | None:
    """Dialog before an action; its result is input, or None."""
    told, wants = pending.action.describe(model, pending.key), pending.action.wants
    match wants:
        case ActionInput.NOTHING:
            return None
        case ActionInput.CONSENT:
            return ConfirmDialog(told)
        case ActionInput.PRIORITY:
            return ChoiceDialog(told, PRIORITIES)
    proposal = filename_of(model, pending.key) if wants is ActionInput.FILENAME else ""
    machine, names = pending.machine, _known(pending)
    describe = None
    if machine is not None and wants is ActionInput.PRESET:
        describe = partial(machine.describe, machine.presets)
    return TextDialog(told, proposal, names, describe)


async def run_action(app: App[None], pending: PendingAction, text: str) -> None:
    """Run the action in a worker: the service may take its time."""
    context = ActionContext(pending.calls, app.copy_to_clipboard, pending.machine)
    try:
        done = await pending.action.do(context, Aim(pending.key, text))
    except (StackError, ConnectionError) as why:
        title = pending.action.label
        app.notify(printable(str(why)), title=title, severity="error", markup=False)
    else:
        app.notify(printable(done), markup=False)


def _known(pending: PendingAction) -> tuple[str, ...]:
    """Possible answers, where the service runs on this computer."""
    if pending.machine is None:
        return ()
    names = {ActionInput.PRESET: pending.machine.presets, ActionInput.MODE: pending.machine.modes}
    return names.get(pending.action.wants, ())
