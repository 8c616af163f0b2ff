"""Settings of the dashboard in `tui.yaml`: theme, colors, keys."""

from collections.abc import Collection
from pathlib import Path

from msgspec import Struct
from textual.color import Color, ColorParseError
from textual.keys import Keys, key_to_character
from textual.theme import BUILTIN_THEMES, Theme

from mlxstack.config.preset_reflection import suggestion
from mlxstack.config.presets import read_struct
from mlxstack.core.errors import SetupError
from mlxstack.tui.actions import ACTIONS
from mlxstack.tui.theme import HOUSE, LIGHT, ThemeChoice, look_from
from mlxstack.tui.widgets.tabs import MODES

FILE = "tui.yaml"
OWN = "own"
"""Name of the theme with the colors of the file."""

COLORS = (
    "primary", "secondary", "accent", "warning", "error", "success", "foreground", "background",
    "surface", "panel",
)  # fmt: skip
THEMES = {HOUSE.name: HOUSE, LIGHT.name: LIGHT, **BUILTIN_THEMES}
MODIFIERS = {"ctrl", "shift", "alt", "meta", "super", "hyper"}
NAMED_KEYS = {key.value for key in Keys}

BINDINGS = {
    **{name: name for name in (*MODES, "help", "log", "quit", "search", "sort", "back")},
    **{action.id: f"action-{action.id}" for action in ACTIONS},
}
"""Ids of bindings by the names of keys in the file."""


class TuiSettings(Struct, frozen=True):
    """Name of the theme, replaced colors of it, keys by their actions."""

    theme: str = ""
    colors: dict[str, str] = {}
    keys: dict[str, str] = {}


def read_settings(path: Path) -> TuiSettings:
    """Settings of a file, or defaults. Raises SetupError for a wrong entry."""
    if not path.exists():
        return TuiSettings()
    settings = read_struct(path, TuiSettings)
    if settings.theme:
        _check_name(f"{path}: theme", settings.theme, THEMES, "theme")
    for name, color in settings.colors.items():
        _check_name(f"{path}: colors", name, COLORS, "color")
        try:
            Color.parse(color)
        except ColorParseError:
            raise SetupError(
                f"{path}: colors.{name} is `{color}`, which is no color; write it as `#56b4e9`"
            ) from None
    for name, keys in settings.keys.items():
        _check_name(f"{path}: keys", name, BINDINGS, "key")
        for key in keys.split(","):
            if not _is_key(key.strip()):
                raise SetupError(
                    f"{path}: keys.{name} is `{key.strip()}`, which no terminal sends; write it as "
                    "`f`, `F`, `ctrl+f`, `f5`, `space` or `question_mark`"
                )
    return settings


def theme_choice(settings: TuiSettings, choice_file: Path) -> ThemeChoice:
    """Theme of the settings, else the last choice in `choice_file`."""
    look = look_from(choice_file)
    look.theme = settings.theme or look.theme
    if settings.colors:
        below = THEMES.get(look.theme, HOUSE)
        own = {name: getattr(below, name) for name in COLORS} | settings.colors
        look.own = Theme(OWN, **own, dark=below.dark)
        look.theme = OWN
    return look


def keymap(settings: TuiSettings) -> dict[str, str]:
    """Keys by the ids of bindings, as Textual takes them."""
    return {
        BINDINGS[name]: ",".join(key.strip() for key in keys.split(","))
        for name, keys in settings.keys.items()
    }


def _check_name(place: str, name: str, valid_names: Collection[str], kind: str) -> None:
    """Raise SetupError for an unknown name."""
    if name not in valid_names:
        hint = suggestion(name, sorted(valid_names))
        raise SetupError(f"{place}: no {kind} is called `{name}`{hint}")


def _is_key(text: str) -> bool:
    """Whether Textual has a key of this name."""
    *modifiers, key = text.split("+")
    is_known = key in NAMED_KEYS or key_to_character(key) is not None
    return is_known and MODIFIERS.issuperset(modifiers)
