"""The themes of the dashboard, and the file that keeps a choice."""

import json
from pathlib import Path

import msgspec
from msgspec import Struct
from textual.theme import Theme

HOUSE = Theme(
    name="mlx-stack",
    primary="#7aa2c8",
    secondary="#cc99c9",
    accent="#56b4e9",
    warning="#e69f00",
    error="#e8743b",
    success="#4fc3a1",
    foreground="#d5d9e0",
    background="#14171c",
    surface="#1b1f26",
    panel="#242a33",
    dark=True,
)
LIGHT = Theme(
    name="mlx-stack-light",
    primary="#33658a",
    secondary="#8b4a86",
    accent="#0072b2",
    warning="#8f5a00",
    error="#b23a00",
    success="#00735a",
    foreground="#1c2026",
    background="#fafbfc",
    surface="#f0f2f5",
    panel="#e3e7ec",
    dark=False,
)
"""Both after the palette of Okabe and Ito, whose hues stay apart for color-blind readers."""


class ThemeChoice(Struct):
    """Name of the theme; `path` keeps the choice, `own` is the user's."""

    theme: str = HOUSE.name
    path: Path | None = None
    own: Theme | None = None

    def choose(self, theme: str) -> None:
        """Save the choice; a read-only home is no error."""
        if self.path is None or theme == self.theme:
            return
        self.theme = theme
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.write_text(json.dumps({"theme": theme}) + "\n", encoding="utf-8")
        except OSError:
            self.path = None


def look_from(path: Path) -> ThemeChoice:
    """Theme chosen last, else the default."""
    try:
        choice = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        choice = {}
    return ThemeChoice(choice.get("theme", HOUSE.name), path)
