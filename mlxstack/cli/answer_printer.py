"""Printer of streamed answers: Markdown in a terminal, else text."""

import sys
from typing import TYPE_CHECKING

from mlxstack.core.formatting import printable_lines

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstack.cli.answer_markdown import MarkdownStream

OPENS = "<think>\n"
CLOSES = "\n</think>\n"


class AnswerPrinter:
    """Prints thoughts and answer as they come.

    On a terminal the answer is rendered Markdown; a continued text (`is_raw`) is not.
    """

    def __init__(self, *, is_raw: bool = False) -> None:
        console = None
        if not is_raw:
            console = _console()
        self._markdown = None if console is None else _stream(console)
        self._is_thinking = False

    def think(self, piece: str) -> None:
        if not self._is_thinking:
            self._write(OPENS)
        self._is_thinking = True
        self._write(printable_lines(piece))

    def answer(self, piece: str) -> None:
        self._end_thinking()
        text = printable_lines(piece)
        if self._markdown is None:
            self._write(text)
        else:
            self._markdown.feed(text)

    def finish(self) -> None:
        """Print the rest, and end the line."""
        self._end_thinking()
        if self._markdown is None:
            self._write("\n")
        else:
            self._markdown.finish()

    def _end_thinking(self) -> None:
        if self._is_thinking:
            self._write(CLOSES)
        self._is_thinking = False

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _console() -> "Console | None":
    """Console of a terminal that can redraw lines, else None."""
    if not sys.stdout.isatty():
        return None
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_dumb_terminal:
        return None
    return console


def _stream(console: "Console") -> "MarkdownStream":
    from mlxstack.cli.answer_markdown import MarkdownStream

    return MarkdownStream(console)
