"""Preset overrides: `--set slots.count=5` and `MLX_STACK_SLOTS_COUNT=5`.

Precedence: command line, then environment, then the file, then what it extends, then defaults.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec.inspect as mi
from msgspec import Struct

from mlxstack.config.preset_schema import (
    PRESET,
    at,
    children,
    leaves,
    nearest,
    parse,
    suggestion,
    why_unknown,
)
from mlxstack.config.yaml_source import Keys, SourcedDocument, SourceLocation
from mlxstack.core.errors import SetupError

PREFIX = "MLX_STACK_"
OTHERS = (
    "API_KEY", "CLIENT_KEY", "CPU", "HOME", "KEY", "LAUNCHD", "LIFELINE", "MEMORY", "PEER_KEY",
    "WORKER",
    "AGENTS", "BIN", "CAPTURES", "CLIENTS", "CODEX", "FORMATS", "TEST_AHEAD", "TEST_DEVICE",
)  # fmt: skip
"""Variables of the package and, in the last line, of its tests that are no keys of presets."""


class Override(Struct, frozen=True):
    """Override of the key path `keys`: `raw` text, and its `label`.

    The label is the option or variable that it came from.
    """

    keys: tuple[str, ...]
    raw: str
    label: str


def from_option(text: str) -> Override:
    """`slots.count=5`. Raises SetupError when there is no `=`."""
    key, equals, raw = text.partition("=")
    key = "model.id" if key.strip() == "model" else key
    if not equals or not key.strip():
        raise SetupError(f"--set {text}: write it as key=value, such as --set slots.count=5")
    return Override(tuple(key.strip().split(".")), raw, f"--set {key.strip()}")


def variables() -> dict[str, tuple[str, ...]]:
    """Every variable that overrides a key: `MLX_STACK_BATCH_MAX_SIZE` and so on."""
    return {PREFIX + "_".join(keys).upper(): keys for keys in leaves()}


def from_environment(env: Mapping[str, str]) -> list[Override]:
    """Overrides in `env`; misspelt keys of known sections are refused."""
    known = variables()
    unknown = unknown_variables(env)
    if unknown:
        raise SetupError(f"{unknown[0]}: no preset has this key{suggestion(unknown[0], known)}")
    return [Override(known[name], env[name], name) for name in sorted(env) if name in known]


def unknown_variables(env: Mapping[str, str]) -> list[str]:
    """Variables that resemble preset keys but name none."""
    shapes = children(PRESET).items()
    sections = [name for name, shape in shapes if isinstance(shape, mi.StructType)]
    prefixes = tuple(f"{PREFIX}{name.upper()}_" for name in sections)
    known = variables()
    return sorted(name for name in env if name.startswith(prefixes) and name not in known)


def unread_variables(env: Mapping[str, str]) -> dict[str, str]:
    """`MLX_STACK_` variables that nothing reads, each with a warning."""
    known = [*variables(), *(PREFIX + name for name in OTHERS)]
    others = {*known, *unknown_variables(env)}
    names = sorted(name for name in env if name.startswith(PREFIX) and name not in others)
    return {name: f"{name} is set, but nothing reads it{_near(name, known)}" for name in names}


def _near(name: str, known: list[str]) -> str:
    """Suggestion of the key without its section, else of a similar word."""
    word, rests = name.removeprefix(PREFIX), [one.removeprefix(PREFIX) for one in known]
    near = next((one for one in rests if one.endswith(f"_{word}")), None) or nearest(word, rests)
    return f"; did you mean `{PREFIX}{near}`?" if near else ""


def document(overrides: Iterable[Override], folder: Path) -> SourcedDocument:
    """Overrides as a document; later ones win. Raises SetupError."""
    values: dict[str, Any] = {}
    marks: dict[Keys, SourceLocation] = {}
    for one in overrides:
        shape = at(one.keys)
        if shape is None or isinstance(shape, mi.StructType):
            raise SetupError(f"{one.label}: {_why_not(one.keys)}")
        section = values
        for key in one.keys[:-1]:
            section = section.setdefault(key, {})
        section[one.keys[-1]] = parse(one.raw, shape)
        marks[one.keys] = SourceLocation(one.label, folder)
    return SourcedDocument(values, marks)


def _why_not(keys: tuple[str, ...]) -> str:
    name = ".".join(keys)
    shape = at(keys)
    if shape is not None:
        return f"{name} is a section; set one of its keys: {', '.join(children(shape))}"
    if why := why_unknown(keys):
        return why
    return f"no preset has the key `{name}`{suggestion(name, map('.'.join, leaves()))}"
