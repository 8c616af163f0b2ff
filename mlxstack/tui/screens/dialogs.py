"""Dialogs before an action: consent, choice, text. None cancels it."""

import asyncio
from collections.abc import Callable
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

MAX_ROWS = 12
CONSENT = ""
"""Answer of a confirmation."""


class Question(ModalScreen[str | None]):
    """Question asked before an action; Escape cancels it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", "Cancel")]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """The question, and the ways to answer it."""
        with Vertical(classes="box"):
            yield Static(self._question, markup=False)
            yield from self.compose_answers()

    def compose_answers(self) -> ComposeResult:
        """Widgets below the question."""
        raise NotImplementedError

    def answer(self, reply: str | None) -> None:
        """Dismiss once: another call would dismiss the next screen."""
        if self.is_active:
            self.dismiss(reply)

    def action_cancel(self) -> None:
        self.answer(None)


class AnswerButton(Button):
    """Answer button; it acts at once, so later keys are ignored."""

    def __init__(self, label: str, reply: str | None, variant: ButtonVariant = "default") -> None:
        super().__init__(label, variant=variant)
        self._reply = reply

    def press(self) -> Self:
        """Answer at once, by mouse or enter."""
        if isinstance(self.screen, Question):
            self.screen.answer(self._reply)
        return self


class ChoiceDialog(Question):
    """One of a few words, by its first letter or by mouse."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(letter, f"choose('{letter}')", show=False) for letter in ascii_lowercase
    ]
    NOTE = "esc leaves it as it is"

    def __init__(self, question: str, choices: tuple[str, ...]) -> None:
        super().__init__(question)
        self._answers: dict[str, str | None] = {word: word for word in choices}

    def compose_answers(self) -> ComposeResult:
        """A button per word."""
        with Horizontal(classes="buttons"):
            for word, answer in self._answers.items():
                variant: ButtonVariant = "warning" if answer == CONSENT else "default"
                yield AnswerButton(f"{word.capitalize()} ({word[0]})", answer, variant)
        if self.NOTE:
            yield Static(self.NOTE, markup=False, classes="note")

    def action_choose(self, letter: str) -> None:
        """Answer by the first letter of a word."""
        for word, answer in self._answers.items():
            if word[0] == letter:
                self.answer(answer)


class ConfirmDialog(ChoiceDialog):
    """Confirmation dialog; Enter means no unless yes has the focus."""

    NOTE = ""

    def __init__(self, question: str) -> None:
        super().__init__(question, ())
        self._answers = {"no": None, "yes": CONSENT}


class TextDialog(Question):
    """Text dialog that suggests choices, with details of `describe`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        # Before the line's own: that one tells of the words later.
        Binding("enter", "accept", priority=True),
        Binding("up", "step(-1)", show=False, priority=True),
        Binding("down", "step(1)", show=False, priority=True),
    ]

    def __init__(
        self,
        question: str,
        proposal: str = "",
        choices: tuple[str, ...] = (),
        describe: Callable[[], dict[str, str]] | None = None,
        *,
        is_empty_allowed: bool = False,
    ) -> None:
        super().__init__(question)
        self._proposal = proposal
        self._choices = dict.fromkeys(choices, "measuring" if describe else "")
        self._describe = describe
        self._is_empty_allowed = is_empty_allowed

    def compose_answers(self) -> ComposeResult:
        """A line to write in, and the choices."""
        suggester = SuggestFromList(tuple(self._choices), case_sensitive=False)
        yield LineInput(self._proposal, max_length=4096, suggester=suggester)
        if self._choices:
            yield Static(self._listing(self._proposal), markup=False, id="choices")
        note = "enter confirms, esc cancels"
        if self._choices:
            note = f"up and down choose, {note}"
        yield Static(note, markup=False, classes="note")

    def on_mount(self) -> None:
        """Describe the choices without holding up the keys."""
        if self._describe is not None:
            self.run_worker(self._add_descriptions(self._describe))

    def on_input_changed(self, event: LineInput.Changed) -> None:
        """Show the choices that contain the text."""
        for listing in self.query("#choices").results(Static):
            listing.update(self._listing(event.value))

    def action_step(self, by: int) -> None:
        """Write the next or the previous choice."""
        line = self.query_one(LineInput)
        names = tuple(self._choices)
        if names:
            index = min(by, 0)
            if line.value in names:
                index = names.index(line.value) + by
            line.value = names[index % len(names)]

    async def _add_descriptions(self, describe: Callable[[], dict[str, str]]) -> None:
        self._choices = await asyncio.to_thread(describe)
        self.query_one("#choices", Static).update(self._listing(self.query_one(LineInput).value))

    def _listing(self, text: str) -> str:
        """Choices around the one in the input, which is marked."""
        names = list(self._choices)
        first = 0
        if text in names:
            first = max(0, names.index(text) - MAX_ROWS // 2)
        else:
            names = [name for name in names if text.lower() in name.lower()]
        widest = max((len(name) for name in self._choices), default=0)
        rows = {name: f"{name:<{widest}}  {self._choices[name]}" for name in names}
        lines = []
        for name in names[first : first + MAX_ROWS]:
            mark = ">" if name == text else " "
            lines.append(f"{mark} {printable(rows[name], 70)}")
        return "\n".join(lines)

    def action_accept(self) -> None:
        """Accept the text; an empty one only where that is allowed."""
        text = self.query_one(LineInput).value.strip()
        self.answer(text if text or self._is_empty_allowed else None)


class SearchDialog(TextDialog):
    """Filter of a table while it is typed; Escape restores it.

    `search` filters the rows by a text, and returns how many are left of how many.
    """

    def __init__(self, question: str, proposal: str, search: Callable[[str], str]) -> None:
        super().__init__(question, proposal, is_empty_allowed=True)
        self._search = search

    def compose_answers(self) -> ComposeResult:
        """The line to write in, and the number of hits."""
        yield from super().compose_answers()
        yield Static(self._search(self._proposal), markup=False, id="hits")

    def on_input_changed(self, event: LineInput.Changed) -> None:
        """Filter by the text so far."""
        if self.is_active:
            self.query_one("#hits", Static).update(self._search(event.value.strip()))

    def action_cancel(self) -> None:
        """Show the rows of before."""
        self._search(self._proposal)
        super().action_cancel()
