"""Carries out a deed: what is asked before, the doing, and what is said after."""

from msgspec import Struct
from textual.app import App

from mlxstack.core.errors import StackError
from mlxstack.tui.deeds import Aim, Calls, Deed, Hands, Wants, filename_of
from mlxstack.tui.model import Model
from mlxstack.tui.screens.asking import Consent, FileName, Question
from mlxstack.tui.views.figures import printable


class Errand(Struct, frozen=True):
    """A deed, to be done to the thing of this key by this service."""

    deed: Deed
    calls: Calls
    key: str


def question(errand: Errand, model: Model) -> Question | None:
    """What is to be asked first; its answer is the words, or None when it shall not be done."""
    told = errand.deed.describe(model, errand.key)
    match errand.deed.wants:
        case Wants.CONSENT:
            return Consent(told)
        case Wants.FILENAME:
            return FileName(told, filename_of(model, errand.key))
    return None


async def carry_out(app: App[None], errand: Errand, words: str) -> None:
    """To be run in a worker: the service may let it wait."""
    hands = Hands(errand.calls, app.copy_to_clipboard)
    try:
        done = await errand.deed.do(hands, Aim(errand.key, words))
    except (StackError, ConnectionError) as why:
        title = errand.deed.label
        app.notify(printable(str(why)), title=title, severity="error", markup=False)
    else:
        app.notify(printable(done), markup=False)
