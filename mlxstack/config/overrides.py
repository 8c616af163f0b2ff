"""Overrides of preset keys: options `--set`, and variables."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec.inspect as mi
from msgspec import Struct

from mlxstack.config import preset_reflection as schema
from mlxstack.config.preset_reflection import Keys
from mlxstack.config.yaml_source import SourcedDocument, SourceLocation
from mlxstack.core.errors import SetupError

PREFIX = "MLX_STACK_"
OTHER_VARIABLES = (
    "API_KEY", "BENCH_KEY", "CLIENT_KEY", "CLIENT_MODEL", "CLIENT_URL", "CPU", "HOME", "KEY",
    "LAUNCHD", "LIFELINE", "MEMORY", "PEER_KEY", "WORKER",
)  # fmt: skip
"""Variables of the package that are no keys of presets."""


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
    return {PREFIX + "_".join(keys).upper(): keys for keys in schema.leaves()}


def from_environment(env: Mapping[str, str]) -> list[Override]:
    """Overrides in `env`; misspelt keys of known sections are refused."""
    keys = variables()
    for name in unknown_variables(env):
        raise SetupError(f"{name}: no preset has this key{schema.suggestion(name, keys)}")
    return [Override(keys[name], env[name], name) for name in sorted(env) if name in keys]


def unknown_variables(env: Mapping[str, str]) -> list[str]:
    """Variables that resemble preset keys but name none."""
    shapes = schema.children(schema.PRESET).items()
    sections = [name for name, shape in shapes if isinstance(shape, mi.StructType)]
    prefixes = tuple(f"{PREFIX}{name.upper()}_" for name in sections)
    keys = variables()
    return sorted(name for name in env if name.startswith(prefixes) and name not in keys)


def unread_variables(env: Mapping[str, str]) -> dict[str, str]:
    """`MLX_STACK_` variables that nothing reads, each with a warning."""
    candidates = [*variables(), *(PREFIX + name for name in OTHER_VARIABLES)]
    read = {*candidates, *unknown_variables(env)}
    names = sorted(name for name in env if name.startswith(PREFIX) and name not in read)
    return {name: f"{name} is set, but nothing reads it{_near(name, candidates)}" for name in names}


def _near(name: str, candidates: list[str]) -> str:
    """Suggestion of the key without its section, else of a similar word."""
    word = name.removeprefix(PREFIX)
    rests = [candidate.removeprefix(PREFIX) for candidate in candidates]
    near = next((key for key in rests if key.endswith(f"_{word}")), None)
    near = near or schema.nearest(word, rests)
    if near:
        return f"; did you mean `{PREFIX}{near}`?"
    return ""


def given_overrides(env: Mapping[str, str], sets: Iterable[str]) -> list[Override]:
    """Overrides in `env`, then those of `--set`. Raises SetupError."""
    return [*from_environment(env), *map(from_option, sets)]


def document_of(overrides: Iterable[Override], folder: Path) -> SourcedDocument:
    """Overrides as a document; later ones win. Raises SetupError."""
    values: dict[str, Any] = {}
    locations: dict[Keys, SourceLocation] = {}
    for override in overrides:
        shape = schema.at(override.keys)
        if shape is None or isinstance(shape, mi.StructType):
            raise SetupError(f"{override.label}: {_why_not(override.keys)}")
        section = values
        for key in override.keys[:-1]:
            section = section.setdefault(key, {})
        section[override.keys[-1]] = schema.parse(override.raw, shape)
        locations[override.keys] = SourceLocation(override.label, folder)
    return SourcedDocument(values, locations)


def _why_not(keys: tuple[str, ...]) -> str:
    name = ".".join(keys)
    shape = schema.at(keys)
    if shape is not None:
        return f"{name} is a section; set one of its keys: {', '.join(schema.children(shape))}"
    if reason := schema.why_unknown(keys):
        return reason
    near = schema.suggestion(name, map(".".join, schema.leaves()))
    return f"no preset has the key `{name}`{near}"
