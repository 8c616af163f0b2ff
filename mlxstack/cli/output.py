"""How the command speaks: tables and JSON on stdout, everything else on stderr."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import typer

PIPE_WIDTH = 10_000
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def as_json(value: object) -> None:
    """`value` as indented JSON on stdout; what JSON has no form for, such as a path, as text."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode())


def note(text: str) -> None:
    """A line for people, on stderr."""
    typer.echo(text, err=True)


def harmless(text: str) -> str:
    """With every sign spelled out that a terminal would obey: others wrote this text."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """A table on stdout, without markup in the data; never wrapped in a pipe."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        drawn.add_column(head, overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(harmless(str(cell))) for cell in row))
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    Console(width=None if is_terminal else PIPE_WIDTH).print(drawn)


@contextmanager
def spinner(what: str) -> Iterator[Callable[[str], None]]:
    """A turning line on stderr while something takes its time; call it with what happens now."""
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(what)) as status:
        yield lambda now: status.update(Text(f"{what}: {now[:100]}"))
