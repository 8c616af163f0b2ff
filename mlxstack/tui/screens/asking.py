"""Questions before a deed: consent, a choice, words. The answer None means: do not."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Key
from textual.screen import ModalScreen
from textual.suggester import SuggestFromList
from textual.widgets import Button, Input, Static

from mlxstack.tui.views.figures import printable
from mlxstack.tui.widgets.entry import Entry

MOST = 400
Question = ModalScreen[str | None]


class Consent(Question):
    """Yes (it needs no words) or no. Enter is no, unless one goes to the other button first."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "agree", "Yes"),
        Binding("n,escape", "refuse", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """The question and two buttons."""
        with Vertical(classes="box"):
            yield Static(self._question, markup=False)
            with Horizontal(classes="buttons"):
                yield Button("No (n)", id="no")
                yield Button("Yes (y)", id="yes", variant="warning")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """By mouse, or enter."""
        self.dismiss("" if event.button.id == "yes" else None)

    def action_agree(self) -> None:
        """By key."""
        self.dismiss("")

    def action_refuse(self) -> None:
        """By key."""
        self.dismiss(None)


class Choice(Question):
    """One of a few words, by its first letter or by mouse."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "Cancel")]

    def __init__(self, question: str, words: tuple[str, ...]) -> None:
        super().__init__()
        self._question = question
        self._words = words

    def compose(self) -> ComposeResult:
        """The question and a button per word."""
        with Vertical(classes="box"):
            yield Static(self._question, markup=False)
            with Horizontal(classes="buttons"):
                for word in self._words:
                    yield Button(f"{word.capitalize()} ({word[0]})", id=word)
            yield Static("esc leaves it as it is", markup=False, classes="note")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """By mouse, or enter."""
        self.dismiss(event.button.id)

    def on_key(self, event: Key) -> None:
        """By first letter."""
        chosen = next((word for word in self._words if word[0] == event.character), None)
        if chosen is not None:
            self.dismiss(chosen)

    def action_cancel(self) -> None:
        """Nothing is done."""
        self.dismiss(None)


class Words(Question):
    """A line to write in; `known` words are proposed while one writes."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "Cancel")]

    def __init__(self, question: str, proposal: str = "", known: tuple[str, ...] = ()) -> None:
        super().__init__()
        self._question = question
        self._proposal = proposal
        self._known = known

    def compose(self) -> ComposeResult:
        """The question, a line to write in, and what is known."""
        suggester = SuggestFromList(self._known, case_sensitive=False)
        with Vertical(classes="box"):
            yield Static(self._question, markup=False)
            yield Entry(self._proposal, max_length=4096, suggester=suggester)
            if self._known:
                yield Static(printable(", ".join(self._known), MOST), markup=False, classes="note")
            yield Static("enter does it, esc does not", markup=False, classes="note")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """No words are no answer."""
        self.dismiss(event.value.strip() or None)

    def action_cancel(self) -> None:
        """Nothing is done."""
        self.dismiss(None)
