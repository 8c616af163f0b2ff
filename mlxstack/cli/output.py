"""Output of commands: tables and JSON on stdout, else on stderr."""

import math
import sys
import termios
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from json import dumps
from typing import TYPE_CHECKING

import typer

from mlxstack.core.formatting import printable, printable_lines, span

if TYPE_CHECKING:
    from rich.progress import TaskID
    from rich.text import Text

GAP = 2
WRAPS_FROM = 24
"""Columns that are narrower than this are never wrapped."""

PIPE_WIDTH = 10_000
LINE_S = 5.0
"""Seconds between two lines on what takes its time."""

STYLES = {
    **dict.fromkeys(("healthy", "ok"), "green"),
    **dict.fromkeys(("degraded", "warn", "down"), "yellow"),
    **dict.fromkeys(("crashed", "bad"), "bold red"),
    "stopped": "dim",
}
"""Colors of StrEnum states; plain text has none."""


def as_json(value: object) -> None:
    """Print `value` as indented JSON; unknown types become text."""
    import msgspec

    try:
        text = msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode()
    except UnicodeEncodeError:
        # A file name may hold bytes that are no UTF-8, which Python keeps as lone surrogates.
        text = dumps(msgspec.to_builtins(value, enc_hook=str), indent=2)
    typer.echo(escaped_json(text))


def escaped_json(text: str) -> str:
    """JSON of the same values, without characters that control a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else dumps(c)[1:-1] for c in text)


def say(text: str, nl: bool = True) -> None:
    """Lines on stdout, without control characters."""
    typer.echo(printable_lines(text), nl=nl)


def note(text: str, *, is_dim: bool = False) -> None:
    """A line for people, on stderr, without control characters."""
    line = printable_lines(text)
    typer.echo(typer.style(line, dim=True) if is_dim else line, err=True)


def emit(text: str) -> None:
    """Text for a shell or a file; printable on a terminal."""
    typer.echo(printable_lines(text) if sys.stdout.isatty() else text, nl=False)


def is_interactive() -> bool:
    """Whether a person can be asked: input and messages are a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm(
    question: str, *, default: bool = False, err: bool = False, abort: bool = False
) -> bool:
    """Ask on the terminal. Raises Abort, with `abort` also for a no.

    What was typed before the question does not answer it.
    """
    if sys.stdin.isatty():
        termios.tcflush(sys.stdin, termios.TCIFLUSH)
    return typer.confirm(printable_lines(question), default=default, err=err, abort=abort)


def table(
    headings: Iterable[str], rows: Iterable[Iterable[object]], least: Sequence[str] = ()
) -> None:
    """Print a table in terminal width; pipes get unwrapped rows.

    Where it does not fit, text wraps between words, then the columns of `least` are left out,
    the first one first. A name, id or URL is never cut: one that is too long for its column runs
    over the next ones, and a table that is still too wide becomes a block of lines per row.
    """
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    console = Console(width=None if is_terminal else PIPE_WIDTH, highlight=False)
    body = [[_cell(value) for value in row] for row in rows]
    for line in layout(list(headings), body, console.width, least):
        console.print(line, soft_wrap=True)


def facts(rows: Iterable[tuple[str, str]]) -> None:
    """Print names with a text each, as a table without heads."""
    from rich.console import Console

    width = Console().width if sys.stdout.isatty() else PIPE_WIDTH
    for line in layout(["", ""], [[_cell(name), _cell(text)] for name, text in rows], width)[1:]:
        typer.echo(line.plain)


def layout(
    headings: list[str], rows: "list[list[Text]]", width: int, least: Sequence[str] = ()
) -> "list[Text]":
    """Lines of a table within `width` cells, without empty columns."""
    columns = [i for i in range(len(headings)) if not rows or any(row[i].plain for row in rows)]
    narrowest = [_narrowest(head, [row[i] for row in rows]) for i, head in enumerate(headings)]
    for head in least:
        if _total([narrowest[i] for i in columns]) <= width:
            break
        columns = [i for i in columns if headings[i] != head]
    squeezed = _squeezed([narrowest[i] for i in columns], width)
    if squeezed is None:
        return _blocks(headings, rows)
    widths = _widths(headings, rows, columns, squeezed, width)
    lines = _line([_styled(headings[i], "bold") for i in columns], widths, width)
    for row in rows:
        lines += _line([row[i] for i in columns], widths, width)
    return lines


@contextmanager
def spinner(title: str) -> Iterator[Callable[[str], None]]:
    """Spinner on stderr, with the time that passed.

    Call it with the current activity. Where stderr is no terminal, it is a line now and then.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    began_at = time.monotonic()

    def line(now: str) -> str:
        return f"{title} ({span(time.monotonic() - began_at)}): {now}"

    if not console.is_terminal:
        yield seldom(lambda now: note(line(now)), LINE_S, began_at)
        return
    with console.status(Text(printable(title))) as status:
        yield lambda now: status.update(Text(printable(line(now[:100]))))


@contextmanager
def counter() -> Iterator[Callable[[str, int, int], None]]:
    """Progress bar on stderr, called with a title and two counts.

    Where stderr is no terminal, it is a line now and then.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        show = seldom(note, LINE_S)
        yield lambda title, n_done, n_all: show(f"{title}: {n_done} of {n_all}")
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars: dict[str, TaskID] = {}

        def update(title: str, n_done: int, n_all: int) -> None:
            if title not in bars:
                bars[title] = progress.add_task(printable(title), total=n_all)
            progress.update(bars[title], completed=n_done, total=n_all)

        yield update


def seldom(
    show: Callable[[str], None], every_s: float, told_at: float = -math.inf
) -> Callable[[str], None]:
    """Function that prints a changed text, at most every `every_s` seconds."""
    line = ""

    def report(now: str) -> None:
        nonlocal told_at, line
        if now != line and time.monotonic() - told_at >= every_s:
            told_at = time.monotonic()
            line = now
            show(now)

    return report


def _cell(value: object) -> "Text":
    style = ""
    if isinstance(value, StrEnum):
        style = STYLES.get(value, "")
    return _styled(printable(" ".join(str(value).splitlines())), style)


def _styled(text: str, style: str) -> "Text":
    from rich.text import Text

    return Text(text, style)


def _narrowest(head: str, cells: "list[Text]") -> int:
    """Cells that a column needs without a break inside a word."""
    widest = max((cell.cell_len for cell in cells), default=0)
    if widest > WRAPS_FROM:
        widest = max(WRAPS_FROM, *map(_longest_word, cells))
    return max(widest, len(head))


def _longest_word(cell: "Text") -> int:
    return max((_styled(word, "").cell_len for word in cell.plain.split()), default=0)


def _total(widths: list[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _squeezed(widths: list[int], width: int) -> list[int] | None:
    """Widths that fit, from narrowing the widest columns, or None."""
    fitting = list(widths)
    while (excess := _total(fitting) - width) > 0:
        widest = max(fitting)
        if widest <= WRAPS_FROM:
            return None
        fitting[fitting.index(widest)] = max(WRAPS_FROM, widest - excess)
    return fitting


def _widths(
    headings: list[str],
    rows: "list[list[Text]]",
    columns: list[int],
    narrowest: list[int],
    width: int,
) -> list[int]:
    """Column widths; spare space goes to wrapping columns."""
    spare = width - _total(narrowest)
    widths = []
    for i, least in zip(columns, narrowest, strict=True):
        widest = max(len(headings[i]), *(row[i].cell_len for row in rows), 0)
        extra = min(spare, max(0, widest - least))
        spare -= extra
        widths.append(least + extra)
    return widths


def _line(cells: "list[Text]", widths: list[int], width: int) -> "list[Text]":
    """Lines of a row, wrapped between words."""
    from rich.console import Console
    from rich.text import Text

    console = Console(width=width)
    wrapped = [
        cell.wrap(console, max(1, wide, _longest_word(cell)))
        for cell, wide in zip(cells, widths, strict=True)
    ]
    lines = []
    for number in range(max(len(cell) for cell in wrapped)):
        line = Text()
        column = 0
        for cell, wide in zip(wrapped, widths, strict=True):
            part = cell[number].copy() if number < len(cell) else Text()
            part.rstrip()
            start = min(column, max(0, width - part.cell_len))
            column += wide + GAP
            if part.plain and line.plain and line.cell_len >= start:
                lines.append(line)
                line = Text()
            if part.plain:
                line.pad_right(start - line.cell_len)
                line.append_text(part)
        lines.append(line)
    return lines


def _blocks(headings: list[str], rows: "list[list[Text]]") -> "list[Text]":
    """Each row as lines of head and value."""
    from rich.text import Text

    wide = max(len(head) for head in headings) + GAP
    lines: list[Text] = []
    for row in rows:
        if lines:
            lines.append(Text())
        lines += [
            Text.assemble((head.ljust(wide), "bold"), cell)
            for head, cell in zip(headings, row, strict=True)
            if cell.plain
        ]
    return lines
