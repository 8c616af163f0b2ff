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


PRIORITIES = tuple(one.name.lower() for one in Priority)


def holder(model: DashboardState, action: Action, key: str) -> str | None:
    """Owner of the slot's context: agent or request; None without slot."""
    if action.target is not ActionTarget.SLOT:
        return None
    slot = next((one for one in model.frame.snapshot.slots if str(one.id) == key), None)
    return (slot.agent or slot.request) if slot else None


def question(
    pending: PendingAction, model: DashboardState, machine: LocalActions | None
) -> Question | None:
    """Dialog before an action; its result is input, or None."""
    told = pending.action.describe(model, pending.key)
    wants = pending.action.wants
    match wants:
        case ActionInput.NOTHING:
            return None
        case ActionInput.CONSENT:
            return ConfirmDialog(told)
        case ActionInput.PRIORITY:
            return ChoiceDialog(told, PRIORITIES)
    proposal = filename_of(model, pending.key) if wants is ActionInput.FILENAME else ""
    if machine is not None and wants is ActionInput.PRESET:
        describe = partial(machine.describe, machine.presets)
        return TextDialog(told, proposal, machine.presets, describe)
    names = machine.modes if machine is not None and wants is ActionInput.MODE else ()
    return TextDialog(told, proposal, names)


async def run_action(app: App[None], action: Action, context: ActionContext, aim: Aim) -> None:
    """Run the action in a worker: the service may take its time."""
    try:
        done = await action.do(context, aim)
    except (StackError, ConnectionError) as why:
        app.notify(printable(str(why)), title=action.label, severity="error", markup=False)
    else:
        app.notify(printable(done), markup=False)
