"""Carries out a deed: what is asked before, the doing, and what is said after."""

from msgspec import Struct
from textual.app import App

from mlxstack.core.ask import Priority
from mlxstack.core.errors import StackError
from mlxstack.tui.deeds import (
    Action,
    ActionContext,
    ActionInput,
    ActionTarget,
    Aim,
    LocalMachine,
    ServiceCalls,
)
from mlxstack.tui.deeds.slots import filename_of
from mlxstack.tui.model import DashboardState
from mlxstack.tui.screens.asking import ChoiceDialog, ConfirmDialog, Question, TextDialog
from mlxstack.tui.views.figures import printable


class PendingAction(Struct, frozen=True):
    """A deed, to be done to the thing of this key by this service; `holder` as it was asked."""

    deed: Action
    calls: ServiceCalls
    key: str
    holder: str | None
    machine: LocalMachine | None = None


PRIORITIES = tuple(one.name.lower() for one in Priority)


def holder(model: DashboardState, deed: Action, key: str) -> str | None:
    """Whose context is in the slot: its agent's, or else that of a request. Only slots have one."""
    if deed.target is not ActionTarget.SLOT:
        return None
    slot = next((one for one in model.frame.snapshot.slots if str(one.id) == key), None)
    return (slot.agent or slot.ask) if slot else None


def question(errand: PendingAction, model: DashboardState) -> Question | None:
    """What is to be asked first; its answer is the words, or None when it shall not be done."""
    told, wants = errand.deed.describe(model, errand.key), errand.deed.wants
    match wants:
        case ActionInput.NOTHING:
            return None
        case ActionInput.CONSENT:
            return ConfirmDialog(told)
        case ActionInput.PRIORITY:
            return ChoiceDialog(told, PRIORITIES)
    proposal = filename_of(model, errand.key) if wants is ActionInput.FILENAME else ""
    return TextDialog(told, proposal, _known(errand))


async def run_action(app: App[None], errand: PendingAction, words: str) -> None:
    """To be run in a worker: the service may let it wait."""
    hands = ActionContext(errand.calls, app.copy_to_clipboard, errand.machine)
    try:
        done = await errand.deed.do(hands, Aim(errand.key, words))
    except (StackError, ConnectionError) as why:
        title = errand.deed.label
        app.notify(printable(str(why)), title=title, severity="error", markup=False)
    else:
        app.notify(printable(done), markup=False)


def _known(errand: PendingAction) -> tuple[str, ...]:
    """What may be answered, as far as this computer knows it."""
    if errand.machine is None:
        return ()
    named = {ActionInput.PRESET: errand.machine.presets, ActionInput.MODE: errand.machine.modes}
    return named.get(errand.deed.wants, ())
