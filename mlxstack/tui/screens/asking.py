"""Questions before a deed: consent, or a file name. The answer None means: do not."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

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


class FileName(Question):
    """A line to write in."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "Cancel")]

    def __init__(self, question: str, proposal: str) -> None:
        super().__init__()
        self._question = question
        self._proposal = proposal

    def compose(self) -> ComposeResult:
        """The question and a line to write in."""
        with Vertical(classes="box"):
            yield Static(self._question, markup=False)
            yield Input(self._proposal, max_length=255)
            yield Static("enter does it, esc does not", markup=False, classes="note")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """An empty name is none."""
        self.dismiss(event.value.strip() or None)

    def action_cancel(self) -> None:
        """Nothing is done."""
        self.dismiss(None)
