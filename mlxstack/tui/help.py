"""Help page of a screen: keys, actions, explanation."""

from collections.abc import Mapping

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


def help_lines(explains: str, keymap: Mapping[str, str]) -> tuple[Line, ...]:
    """Keys and actions of a screen, its explanation; `keymap` replaces keys."""
    paragraphs: list[Line] = [(TextCell(paragraph),) for paragraph in explains.split("\n")]
    actions = [
        _key(
            keymap.get(f"action-{action.id}", action.key),
            f"{action.label} ({action.target}): {action.help}",
        )
        for action in ACTIONS
    ]
    keys = [_key(keymap.get(name, key), told) for name, key, told in KEYS]
    return (*keys, *actions, (), *paragraphs)


def _key(key: str, told: str) -> Line:
    return (TextCell(f"  {key:<8} ", CellStyle.BUSY), TextCell(told))
