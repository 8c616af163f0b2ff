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


PRIORITIES = tuple(priority.name.lower() for priority in Priority)


def holder(model: DashboardState, action: Action, key: str) -> str | None:
    """Owner of the slot's context: agent or request; None without slot."""
    if action.target is not ActionTarget.SLOT:
        return None
    for slot in model.frame.snapshot.slots:
        if str(slot.id) == key:
            return slot.agent or slot.request
    return None


def question(
    pending: PendingAction, model: DashboardState, machine: LocalActions | None
) -> Question | None:
    """Dialog before an action; its result is input, or None."""
    text = pending.action.describe(model, pending.key)
    wants = pending.action.wants
    match wants:
        case ActionInput.NOTHING:
            return None
        case ActionInput.CONSENT:
            return ConfirmDialog(text)
        case ActionInput.PRIORITY:
            return ChoiceDialog(text, PRIORITIES)
        case ActionInput.FILENAME:
            return TextDialog(text, filename_of(model, pending.key))
    if machine is not None and wants is ActionInput.PRESET:
        describe = partial(machine.describe, machine.presets)
        return TextDialog(text, "", machine.presets, describe)
    modes: tuple[str, ...] = ()
    if machine is not None and wants is ActionInput.MODE:
        modes = machine.modes
    return TextDialog(text, "", modes)


async def run_action(app: App[None], action: Action, context: ActionContext, aim: Aim) -> None:
    """Run the action in a worker: the service may take its time."""
    try:
        done = await action.do(context, aim)
    except (StackError, ConnectionError) as error:
        app.notify(printable(str(error)), title=action.label, severity="error", markup=False)
    else:
        app.notify(printable(done), markup=False)
