"""Help page of a screen: keys, actions, and its section of help.md."""

from collections.abc import Mapping
from importlib.resources import files

from mlxstack.tui.actions import ACTIONS
from mlxstack.tui.views.table_data import CellStyle, Line, TextCell

KEYS = (
    ("", "1 to 5", "the screens"),
    ("", "tab", "the next table"),
    ("", "up down", "choose a row; enter shows more where the heading says so"),
    ("search", "/", "show only rows with some words; an empty line shows all"),
    ("sort", "s", "sort by the next column"),
    ("log", "l", "the end of the service log"),
    ("", "ctrl+p", "the command palette: everything that can be done, and the themes"),
    ("help", "?", "this page"),
    ("quit", "q", "leave; the service goes on"),
)
"""Ids of bindings, their keys, and what these do."""


def help_lines(heading: str, keymap: Mapping[str, str]) -> tuple[Line, ...]:
    """Keys and actions of a screen, then its help; `keymap` replaces keys."""
    paragraphs: list[Line] = []
    for paragraph in _section(heading).split("\n\n"):
        paragraphs += [(), (TextCell(" ".join(paragraph.split())),)]
    actions = [
        _key(
            keymap.get(f"action-{action.id}", action.key),
            f"{action.label} ({action.target}): {action.help}",
        )
        for action in ACTIONS
    ]
    keys = [_key(keymap.get(name, key), effect) for name, key, effect in KEYS]
    return (*keys, *actions, *paragraphs)


def _section(heading: str) -> str:
    """Text below a heading of help.md. Raises KeyError."""
    page = files("mlxstack.tui").joinpath("help.md").read_text(encoding="utf-8")
    sections = {}
    for section in page.removeprefix("# ").split("\n# "):
        name, _, text = section.partition("\n")
        sections[name] = text.strip()
    return sections[heading]


def _key(key: str, effect: str) -> Line:
    return (TextCell(f"  {key:<8} ", CellStyle.BUSY), TextCell(effect))
