"""The house theme, and how a choice of another one is kept."""

import json
from pathlib import Path

import msgspec
from msgspec import Struct
from textual.theme import Theme

HOUSE = Theme(
    name="mlx-stack",
    primary="#7aa2c8",
    secondary="#9d8ec7",
    accent="#6fb7c9",
    warning="#e0af68",
    error="#e06c75",
    success="#8fbf7f",
    foreground="#d5d9e0",
    background="#14171c",
    surface="#1b1f26",
    panel="#242a33",
    dark=True,
)


class ThemeChoice(Struct):
    """The name of a theme, and the file in which the choice is kept; None keeps nothing."""

    theme: str = HOUSE.name
    path: Path | None = None

    def choose(self, theme: str) -> None:
        """Keep it. A home that cannot be written to is no reason to stop."""
        if self.path is None or theme == self.theme:
            return
        self.theme = theme
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.path.write_text(json.dumps({"theme": theme}) + "\n", encoding="utf-8")
        except OSError:
            self.path = None


class _Kept(Struct):
    theme: str = HOUSE.name


def look_from(path: Path) -> ThemeChoice:
    """The look that was chosen last; the house theme when the file is not there or not sound."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
    except (OSError, msgspec.DecodeError):
        kept = _Kept()
    return ThemeChoice(kept.theme, path)
