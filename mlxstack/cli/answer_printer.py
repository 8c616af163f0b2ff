"""Printer of streamed answers: wrapped words, colored code in a terminal."""

import re
import sys
from typing import TYPE_CHECKING

from mlxstack.core.formatting import printable_lines

if TYPE_CHECKING:
    from rich.console import Console

FENCE = re.compile(r"\s*(```|~~~)\s*([\w+#.-]*)")
PARTS = re.compile(r"\n|[^\S\n]+|\S+")
"""Line ends, white space, words."""

THEME = "ansi_dark"
"""The terminal's own 16 colors, on its own background."""


class AnswerPrinter:
    """Prints pieces of text as they come; in a pipe unchanged.

    In a terminal a word is printed when it is complete, and a line of code when its line is.
    """

    def __init__(self) -> None:
        is_terminal = sys.stdout.isatty()
        self._console = _console() if is_terminal else None
        self._rest = ""
        self._column = 0
        self._language: str | None = None

    def feed(self, piece: str) -> None:
        """Print what is complete of all pieces so far."""
        text = printable_lines(piece)
        if self._console is None:
            self._write(text)
            return
        self._rest += text
        *lines, self._rest = self._rest.split("\n")
        for line in lines:
            self._end_line(line)
        if self._language is None and not self._may_be_fence(self._rest):
            # The last word may go on in the next piece.
            complete = self._rest[: len(self._rest) - len(self._rest.split(" ")[-1])]
            self._print_words(complete)
            self._rest = self._rest[len(complete) :]

    def finish(self) -> None:
        """Print the rest, and end the line."""
        if self._language is not None:
            self._code(self._rest)
        elif self._rest:
            self._print_words(self._rest)
        self._rest, self._language = "", None
        self._write("\n")
        self._column = 0

    def _end_line(self, line: str) -> None:
        fence = FENCE.match(line) if self._column == 0 else None
        if fence is not None:
            self._language = (fence[2] or "text") if self._language is None else None
            self._write(line)
        elif self._language is not None:
            self._code(line)
        else:
            self._print_words(line)
        self._write("\n")
        self._column = 0

    def _may_be_fence(self, line: str) -> bool:
        start = line.lstrip()
        return self._column == 0 and ("```".startswith(start[:3]) or "~~~".startswith(start[:3]))

    def _print_words(self, text: str) -> None:
        from rich.cells import cell_len

        assert self._console is not None
        for part in PARTS.findall(text):
            wide = cell_len(part)
            if self._column and self._column + wide > self._console.width:
                self._write("\n")
                self._column = 0
                if part.isspace():
                    continue
            self._write(part)
            self._column += wide

    def _code(self, line: str) -> None:
        from rich.syntax import Syntax

        assert self._console is not None and self._language is not None
        syntax = Syntax("", self._language, theme=THEME)
        colored = syntax.highlight(line)
        colored.rstrip()
        self._console.print(colored, end="")

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)
