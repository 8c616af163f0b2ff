"""Presets as files: found, layered and checked."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import msgspec.inspect as mi
from msgspec import Struct

from mlxstack.config import preset_checks
from mlxstack.config import preset_reflection as schema
from mlxstack.config.overrides import Override, document_of
from mlxstack.config.preset_reflection import Keys
from mlxstack.config.yaml_source import (
    SourcedDocument,
    SourceLocation,
    dotted,
    merge,
    parsed_yaml,
    read_yaml,
)
from mlxstack.core.errors import SetupError
from mlxstack.core.preset import Preset
from mlxstack.host.home import Home

T = TypeVar("T")

ENDINGS = (".yaml", ".yml")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

BUILTIN_MODEL = "demo"
"""The id of the model that comes with the package."""

FOLDER_SIGNS = ("/", "./", "../", "~")
MODELS: tuple[Keys, ...] = (("model", "id"), ("model", "draft"), ("model", "mtp"))
FOLDERS: tuple[Keys, ...] = (("model", "adapter"), ("slots", "save_path"))
"""Keys of models, which may be folders, and of folders."""


def is_folder(model_id: str) -> bool:
    """Whether a model id is a folder (`./x`, `/x`, `~/x`)."""
    return model_id in {".", ".."} or model_id.startswith(FOLDER_SIGNS)


def expanded(path: str) -> Path:
    """The path without its `~`. Raises SetupError for an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise SetupError(f"cannot expand the path {path!r}: no such user") from error


def _absolute(preset: Preset, document: SourcedDocument, home: Home) -> Preset:
    """The preset with every path absolute, and `slots.save_path` filled in.

    A relative path is meant from the folder of the file that holds it, or from the current
    folder when it came by option or variable.
    """
    values = msgspec.to_builtins(preset)
    warm = range(len(preset.prefix_cache.warm_prefixes))
    files = [
        ("prefix_cache", "warm_prefixes", position, kind)
        for position in warm
        for kind in preset_checks.FILES
    ]
    for keys in (*MODELS, *FOLDERS, *files):
        section = _value(values, keys[:-1])
        path = section[keys[-1]]
        if path is not None and (keys not in MODELS or is_folder(path)):
            section[keys[-1]] = _from(document, keys, path)
    values["slots"]["save_path"] = values["slots"]["save_path"] or str(home.slots / preset.name)
    return msgspec.convert(values, Preset)


def _from(document: SourcedDocument, keys: Keys, path: str) -> str:
    mark = document.location(keys)
    try:
        return str((mark.folder / expanded(path)).resolve())
    except (SetupError, ValueError, OSError) as error:
        raise SetupError(f"{mark}: {dotted(keys)} is no path: {error}") from error


class LoadedPreset(Struct, frozen=True):
    """Valid preset; `origins` maps each set key to its source.

    For example `slots.count` -> `demo.yaml:8`. Other keys have their default.
    """

    preset: Preset
    source: Path
    origins: dict[str, str]


def builtin_folder() -> Path:
    """Folder of the builtin presets, in the wheel or checkout."""
    package = Path(__file__).parent.parent
    inside = package / "presets"
    if inside.is_dir():
        return inside
    return package.parent / "presets"


def listed(home: Home) -> dict[str, Path]:
    """Presets by name: own ones first, then builtin, then derived."""
    return files_in(home.derived_presets, builtin_folder(), home.presets)


def files_in(*folders: Path) -> dict[str, Path]:
    """Presets or modes by name; those of later folders win."""
    presets: dict[str, Path] = {}
    for folder in folders:
        files = sorted(folder.iterdir(), key=lambda file: file.stem) if folder.is_dir() else []
        # macOS writes `._NAME` beside files on disks that are not its own.
        presets |= {f.stem: f for f in files if f.suffix in ENDINGS and f.name[0] != "."}
    return presets


def is_path(name: str) -> bool:
    """Whether a preset is given by file rather than name."""
    return name.endswith(ENDINGS) or name.startswith(FOLDER_SIGNS)


def is_known(name: str, home: Home) -> bool:
    """Whether a preset is meant, by name or file, no model."""
    return name.endswith(ENDINGS) or file_of(name, home) is not None


def file_of(name: str, home: Home) -> Path | None:
    """File of a listed preset; None where none has the name.

    Derived presets, one for each model on disk, are not listed for it.
    """
    files = files_in(builtin_folder(), home.presets)
    if name in files or "/" in name:
        return files.get(name)
    derived = (home.derived_presets / f"{name}{ending}" for ending in ENDINGS)
    return next(filter(os.path.isfile, derived), None)


def from_anywhere(name: str, folder: Path | None = None) -> str:
    """Preset name, or absolute path, the same from any folder.

    `folder` is where a relative path starts: that of the file that holds it, else the current one.
    """
    if not is_path(name):
        return name
    return str(((folder or Path()) / expanded(name)).absolute())


def find(name: str, home: Home) -> Path:
    """File of a preset by name or path. Raises SetupError."""
    if is_path(name):
        path = Path(from_anywhere(name))
        if "\0" in name or not path.is_file():
            raise SetupError(f"there is no preset file {path}")
        return path
    file = file_of(name, home)
    if file is None:
        near = schema.suggestion(name, listed(home))
        raise SetupError(
            f"no preset is called `{name}` (looked in {builtin_folder()} and {home.presets}; "
            f"a path to a .yaml file works too, and `up` takes a hub id){near}"
        )
    return file


def delete(name: str, home: Home) -> Path:
    """Delete a user's or derived preset. Raises SetupError for others."""
    path = None
    if not is_path(name):
        path = find(name, home)
    if path is None or path.parent not in (home.presets, home.derived_presets):
        raise SetupError(f"{name} is not a preset of your own; `mlx-stack presets` lists all")
    path.unlink()
    return path


def load(
    name: str, home: Home, over: Iterable[Override] = (), cwd: Path | None = None
) -> LoadedPreset:
    """Read, extend, override and check. `cwd` is where paths in `over` start.

    Raises SetupError naming the file, the key, the line, what was found and what would be right.
    """
    source = find(name, home)
    return _loaded(source, read_yaml(source), home, over, cwd)


def load_text(
    text: str, source: Path, home: Home, over: Iterable[Override] = (), cwd: Path | None = None
) -> LoadedPreset:
    """Preset of a file with this `text`. Raises as `load` does."""
    return _loaded(source, parsed_yaml(text, source), home, over, cwd)


def _loaded(
    source: Path, document: SourcedDocument, home: Home, over: Iterable[Override], cwd: Path | None
) -> LoadedPreset:
    document = _layers(source, document, home)
    document = merge(document, _normalized(document_of(over, cwd or Path.cwd())))
    document.values.setdefault("name", source.stem)
    return LoadedPreset(_checked(document, home), source, _origins(document))


def overridden(preset: Preset, over: Iterable[Override], home: Home) -> Preset:
    """A resolved preset with some keys changed. Raises SetupError as `load` does."""
    top = SourceLocation(preset.name, Path.cwd())
    document = SourcedDocument(msgspec.to_builtins(preset), {(): top})
    return _checked(merge(document, _normalized(document_of(over, Path.cwd()))), home)


def read_resolved(path: Path) -> Preset:
    """The preset that `up` resolved for its worker. Raises SetupError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Preset)
    except (OSError, msgspec.MsgspecError) as error:
        raise SetupError(f"the resolved preset {path} cannot be read: {error}") from error


def _layers(
    source: Path, document: SourcedDocument, home: Home, seen: tuple[Path, ...] = ()
) -> SourcedDocument:
    document = _normalized(document)
    base = document.values.pop("extends", None)
    mark = document.locations.pop(("extends",), None)
    for keys, place in document.locations.items():
        if reason := schema.why_unknown(keys):
            raise SetupError(f"{place}: {reason}")
    _refuse_unknown(document, schema.PRESET, "extends")
    if base is None:
        return document
    if not isinstance(base, str):
        raise SetupError(f"{mark}: extends must be the name or the path of another preset")
    below = _base_of(base, mark, home)
    if below == source:
        # A user's preset may extend the shipped or derived one that it replaces.
        below = files_in(home.derived_presets, builtin_folder()).get(base, below)
    if below in (*seen, source):
        chain = " -> ".join(path.stem for path in (*seen, source, below))
        raise SetupError(f"{mark}: the presets extend each other in a circle: {chain}")
    layers = _layers(below, read_yaml(below), home, (*seen, source))
    layers.values.pop("name", None)
    layers.locations.pop(("name",), None)
    return merge(layers, document)


def _normalized(document: SourcedDocument) -> SourcedDocument:
    return SourcedDocument(schema.normalized(document.values), document.locations)


def _base_of(base: str, mark: SourceLocation | None, home: Home) -> Path:
    try:
        return find(from_anywhere(base, mark.folder if mark is not None else None), home)
    except SetupError as error:
        raise SetupError(f"{mark}: {error.message}") from error


def _refuse_unknown(document: SourcedDocument, form: mi.Type, *names: str) -> None:
    """Raise SetupError for a key outside `form` and `others`."""
    for keys in schema.unknown(document.values, form):
        section = schema.at(keys[:-1], form)
        keys_below = schema.children(section) if section is not None else {}
        choices = list(keys_below)
        if len(keys) == 1:
            choices += names
        near = schema.suggestion(str(keys[-1]), choices)
        raise SetupError(f"{document.location(keys)}: unknown key `{dotted(keys)}`{near}")


def read_struct(path: Path, kind: type[T]) -> T:
    """Struct of a YAML file. Raises SetupError naming key and line."""
    document = read_yaml(path)
    _refuse_unknown(document, mi.type_info(kind))
    for keys in schema.endless(document.values):
        raise SetupError(f"{document.location(keys)}: {dotted(keys)} must be finite")
    try:
        return msgspec.convert(document.values, kind)
    except msgspec.ValidationError as error:
        raise SetupError(f"{path}: {error}") from error


def _checked(document: SourcedDocument, home: Home) -> Preset:
    for keys in schema.endless(document.values):
        value = schema.shown(_value(document.values, keys))
        raise SetupError(
            f"{document.location(keys)}: {dotted(keys)} is {value}, but must be finite"
        )
    try:
        preset = msgspec.convert(document.values, Preset)
    except msgspec.ValidationError as error:
        raise SetupError(_complaint(document, str(error))) from error
    if not NAME.fullmatch(preset.name):
        raise SetupError(
            f"{document.location(('name',))}: name is `{preset.name}`, but must be 1 to 64 "
            "letters, "
            "digits, dots, dashes or underscores, the first a letter or digit"
        )
    for keys, problem in preset_checks.violations(preset):
        raise SetupError(f"{document.location(keys)}: {dotted(keys)} {problem}")
    return _absolute(preset, document, home)


def _complaint(document: SourcedDocument, message: str) -> str:
    problem, _, where = message.partition(" - at `$")
    keys = _keys(where)
    missing = re.search(r"missing required field `(.+)`", problem)
    if missing:
        keys = (*keys, missing[1])
        right = schema.allowed(keys)
        return f"{document.location(keys)}: `{dotted(keys)}` is missing; it must be {right}"
    value = schema.shown(_value(document.values, keys))
    right = schema.allowed(keys)
    return f"{document.location(keys)}: {dotted(keys)} is {value}, but must be {right}"


def _keys(where: str) -> Keys:
    steps = re.findall(r"\.([^.\[\]`]+)|\[(\d+)\]", where)
    return tuple(int(place) if place else name for name, place in steps)


def _value(values: Any, keys: Keys) -> Any:
    for key in keys:
        values = values[key]
    return values


def _origins(document: SourcedDocument) -> dict[str, str]:
    return {
        dotted(keys): str(mark)
        for keys, mark in document.locations.items()
        if keys and not isinstance(_value(document.values, keys), dict)
    }
