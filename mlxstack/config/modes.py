"""Modes: named sets of presets that run together."""

from pathlib import Path

import msgspec
import yaml
from msgspec import Struct

from mlxstack.config import preset_reflection as preset_schema
from mlxstack.config import presets
from mlxstack.core.errors import SetupError, Taken
from mlxstack.host.home import Home, make_folder
from mlxstack.host.services import read_json, write_json, write_private

FOLDER = "modes"
Value = str | int | float | bool | None


class Member(Struct, frozen=True, omit_defaults=True):
    """Preset by name or path, with the keys that this mode overrides."""

    preset: str
    set: dict[str, Value] = {}

    @property
    def options(self) -> tuple[str, ...]:
        """The changes as `--set` takes them."""
        return tuple(f"{key}={_typed(value)}" for key, value in self.set.items())


class Mode(Struct, frozen=True, omit_defaults=True):
    """Members start in this order."""

    members: tuple[Member, ...]
    description: str = ""


class Active(Struct, frozen=True):
    """The mode that was switched to last, and its services."""

    name: str
    services: tuple[str, ...]


def listed(home: Home) -> dict[str, Path]:
    """Modes by name; a user's own precedes a builtin one."""
    return presets.files_in(presets.builtin_folder() / FOLDER, home.presets / FOLDER)


def load(name: str, home: Home) -> Mode:
    """Read and check. Raises SetupError naming the file and the line."""
    files = listed(home)
    if name not in files:
        raise SetupError(f"no mode is called `{name}`{preset_schema.suggestion(name, files)}")
    mode = presets.read_struct(files[name], Mode)
    if not mode.members:
        raise SetupError(f"{files[name]}: a mode needs at least one member")
    return mode


def create(name: str, names: list[str], description: str, home: Home) -> Path:
    """Write a mode of these presets.

    Raises SetupError for a wrong preset or name, Taken when the mode is there already.
    """
    if not presets.NAME.fullmatch(name):
        raise SetupError(f"`{name}` cannot be the name of a mode; use letters, digits and dashes")
    path = home.presets / FOLDER / f"{name}.yaml"
    if path.exists():
        raise Taken(f"{path} exists already; remove it, or choose another name")
    for preset in names:
        presets.load(preset, home)
    mode = Mode(tuple(Member(presets.from_anywhere(preset)) for preset in names), description)
    make_folder(path.parent)
    text = yaml.safe_dump(msgspec.to_builtins(mode), sort_keys=False)
    write_private(path, text.encode())
    return path


def active(home: Home) -> Active | None:
    """The mode that was switched to last; None when there was none."""
    return read_json(_file(home), Active)


def mark_active(home: Home, now: Active | None) -> None:
    """Remember the mode that runs."""
    if now is None:
        _file(home).unlink(missing_ok=True)
    else:
        write_json(_file(home), now)


def _file(home: Home) -> Path:
    return home.run / "mode"


def _typed(value: Value) -> str:
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
