"""Markdown of a streamed answer in a terminal."""

from typing import ClassVar

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Markdown, MarkdownElement
from rich.segment import Segment, Segments
from rich.syntax import Syntax

THEME = "ansi_dark"
"""The terminal's own 16 colors, on its own background."""

DRAWS_PER_S = 8

PARSER = MarkdownIt().enable("table")


class CodeLines(CodeBlock):
    """Code without margins, so that a selection is the code."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(str(self.text).rstrip(), self.lexer_name, theme=self.theme, word_wrap=True)


class AnswerText(Markdown):
    """Rendered Markdown whose addresses are shown, since a model wrote them."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements, "fence": CodeLines, "code_block": CodeLines,
    }  # fmt: skip

    def __init__(self, text: str) -> None:
        super().__init__(text, code_theme=THEME, hyperlinks=False)


class MarkdownStream:
    """Prints finished blocks, and redraws the end of the last one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rest = ""
        self._is_first = True
        self._live: Live | None = None

    def feed(self, text: str) -> None:
        """Add a piece, and print the blocks that it finishes."""
        self._rest += text
        if "\n" in text and (n := finished(self._rest)):
            blocks = self._rest[:n]
            self._rest = self._rest[n:]
            self._print(blocks)
        if self._live is None:
            self._live = Live(
                console=self._console,
                get_renderable=self._end,
                transient=True,
                refresh_per_second=DRAWS_PER_S,
            )
            self._live.start()

    def finish(self) -> None:
        """Print the last block."""
        if self._live is not None:
            self._live.stop()
        self._live = None
        self._print(self._rest)
        self._rest = ""
        self._is_first = True

    def _print(self, blocks: str) -> None:
        if not blocks.strip():
            return
        if not self._is_first:
            self._console.print()
        self._console.print(AnswerText(blocks))
        self._is_first = False

    def _end(self) -> Segments:
        """The lines of the unfinished block that a screen holds."""
        lines = self._console.render_lines(AnswerText(self._rest), pad=False)
        visible = lines[-max(1, self._console.height - 2) :]
        return Segments([part for line in visible for part in (*line, Segment.line())])


def finished(text: str) -> int:
    """Characters of all blocks but the last one, which may go on."""
    starts = [token.map[0] for token in PARSER.parse(text) if token.level == 0 and token.map]
    if not starts:
        return 0
    return sum(len(line) + 1 for line in text.split("\n")[: starts[-1]])
