"""Questions before a deed: consent, a choice, words. The answer None means: do not."""

from string import ascii_lowercase
from typing import ClassVar, Self

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.suggester import SuggestFromList
from textual.widgets import Button, Static
from textual.widgets.button import ButtonVariant

from mlxstack.core.formatting import printable
from mlxstack.tui.widgets.text_input import LineInput

MOST = 400


class Question(ModalScreen[str | None]):
    """What is asked before a deed."""

    def answer(self, words: str | None) -> None:
        """The first answer counts: after it, another screen would be the one to be dismissed."""
        if self.is_active:
            self.dismiss(words)


class AnswerButton(Button):
    """An answer to be pressed. It acts at once: a key that comes after it is no answer any more."""

    def __init__(self, label: str, words: str | None, variant: ButtonVariant = "default") -> None:
        super().__init__(label, variant=variant)
        self._words = words

    def press(self) -> Self:
        """By mouse, or enter."""
        if isinstance(self.screen, Question):
            self.screen.answer(self._words)
        return self


class ConfirmDialog(Question):
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
                yield AnswerButton("No (n)", None)
                yield AnswerButton("Yes (y)", "", "warning")

    def action_agree(self) -> None:
        """By key."""
        self.answer("")

    def action_refuse(self) -> None:
        """By key."""
        self.answer(None)


class ChoiceDialog(Question):
    """One of a few words, by its first letter or by mouse."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(letter, f"choose('{letter}')", show=False) for letter in ascii_lowercase),
        Binding("escape", "cancel", "Cancel"),
    ]

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
                    yield AnswerButton(f"{word.capitalize()} ({word[0]})", word)
            yield Static("esc leaves it as it is", markup=False, classes="note")

    def action_choose(self, letter: str) -> None:
        """By first letter."""
        chosen = next((word for word in self._words if word[0] == letter), None)
        if chosen is not None:
            self.answer(chosen)

    def action_cancel(self) -> None:
        """Nothing is done."""
        self.answer(None)


class TextDialog(Question):
    """A line to write in; `known` words are proposed while one writes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        # Before the line's own: that one tells of the words later.
        Binding("enter", "accept", priority=True),
        Binding("escape", "cancel", "Cancel"),
    ]

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
            yield LineInput(self._proposal, max_length=4096, suggester=suggester)
            if self._known:
                yield Static(printable(", ".join(self._known), MOST), markup=False, classes="note")
            yield Static("enter does it, esc does not", markup=False, classes="note")

    def action_accept(self) -> None:
        """No words are no answer."""
        self.answer(self.query_one(LineInput).value.strip() or None)

    def action_cancel(self) -> None:
        """Nothing is done."""
        self.answer(None)
