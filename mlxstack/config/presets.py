"""Loads presets by name or path; errors name the line."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.config import overrides, preset_paths, preset_schema, preset_validation
from mlxstack.config.overrides import Override
from mlxstack.config.yaml_source import (
    Keys,
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

ENDINGS = (".yaml", ".yml")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


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
    return inside if inside.is_dir() else package.parent / "presets"


def listed(home: Home) -> dict[str, Path]:
    """Presets by name: own ones first, then builtin, then derived."""
    return _files(home.derived_presets, builtin_folder(), home.presets)


def _files(*folders: Path) -> dict[str, Path]:
    """Presets by name; those of later folders win."""
    presets: dict[str, Path] = {}
    for folder in folders:
        files = sorted(folder.iterdir(), key=lambda file: file.stem) if folder.is_dir() else []
        presets |= {file.stem: file for file in files if file.suffix in ENDINGS}
    return presets


def is_path(name: str) -> bool:
    """Whether a preset is given by file rather than name."""
    return name.endswith(ENDINGS) or name.startswith(preset_paths.FOLDER_SIGNS)


def from_anywhere(name: str, folder: Path | None = None) -> str:
    """Preset name, or absolute path, the same from any folder.

    `folder` is where a relative path starts: that of the file that holds it, else the current one.
    """
    if not is_path(name):
        return name
    return str(((folder or Path()) / preset_paths.expanded(name)).absolute())


def find(name: str, home: Home) -> Path:
    """File of a preset by name or path. Raises SetupError."""
    if is_path(name):
        path = Path(from_anywhere(name))
        if "\0" in name or not path.is_file():
            raise SetupError(f"there is no preset file {path}")
        return path
    known = listed(home)
    if name not in known:
        near = preset_schema.suggestion(name, known)
        raise SetupError(
            f"no preset is called `{name}` (looked in {builtin_folder()} and {home.presets}; "
            f"a path to a .yaml file works too, and `up` takes a hub id){near}"
        )
    return known[name]


def delete(name: str, home: Home) -> Path:
    """Delete a user's or derived preset. Raises SetupError for others."""
    path = find(name, home) if not is_path(name) else None
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
    source: Path,
    document: SourcedDocument,
    home: Home,
    over: Iterable[Override],
    cwd: Path | None,
) -> LoadedPreset:
    document = _layers(source, document, home)
    document = merge(document, _normalized(overrides.document(over, cwd or Path.cwd())))
    document.values.setdefault("name", source.stem)
    return LoadedPreset(_checked(document, home), source, _origins(document))


def overridden(preset: Preset, over: Iterable[Override], home: Home) -> Preset:
    """A resolved preset with some keys changed. Raises SetupError as `load` does."""
    top = SourceLocation(preset.name, Path.cwd())
    document = SourcedDocument(msgspec.to_builtins(preset), {(): top})
    return _checked(merge(document, _normalized(overrides.document(over, Path.cwd()))), home)


def read_resolved(path: Path) -> Preset:
    """The preset that `up` resolved for its worker. Raises SetupError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Preset)
    except (OSError, msgspec.MsgspecError) as why:
        raise SetupError(f"the resolved preset {path} cannot be read: {why}") from why


def _layers(
    source: Path, document: SourcedDocument, home: Home, seen: tuple[Path, ...] = ()
) -> SourcedDocument:
    document = _normalized(document)
    base = document.values.pop("extends", None)
    mark = document.locations.pop(("extends",), None)
    _refuse_unknown(document)
    if base is None:
        return document
    if not isinstance(base, str):
        raise SetupError(f"{mark}: extends must be the name or the path of another preset")
    below = _base_of(base, mark, home)
    if below == source:
        # A user's preset may extend the shipped or derived one that it replaces.
        below = _files(home.derived_presets, builtin_folder()).get(base, below)
    if below in (*seen, source):
        chain = " -> ".join(one.stem for one in (*seen, source, below))
        raise SetupError(f"{mark}: the presets extend each other in a circle: {chain}")
    layers = _layers(below, read_yaml(below), home, (*seen, source))
    return merge(_without_name(layers), document)


def _normalized(document: SourcedDocument) -> SourcedDocument:
    return SourcedDocument(preset_schema.normalized(document.values), document.locations)


def _base_of(base: str, mark: SourceLocation | None, home: Home) -> Path:
    try:
        return find(from_anywhere(base, mark.folder if mark is not None else None), home)
    except SetupError as why:
        raise SetupError(f"{mark}: {why.message}") from why


def _without_name(document: SourcedDocument) -> SourcedDocument:
    values = {key: value for key, value in document.values.items() if key != "name"}
    marks = {keys: mark for keys, mark in document.locations.items() if keys != ("name",)}
    return SourcedDocument(values, marks)


def _refuse_unknown(document: SourcedDocument) -> None:
    for keys, place in document.locations.items():
        if why := preset_schema.why_unknown(keys):
            raise SetupError(f"{place}: {why}")
    for keys in preset_schema.unknown(document.values):
        section = preset_schema.at(keys[:-1])
        known = preset_schema.children(section) if section is not None else {}
        top = {"extends": None} if len(keys) == 1 else {}
        near = preset_schema.suggestion(str(keys[-1]), [*known, *top])
        raise SetupError(f"{document.location(keys)}: unknown key `{dotted(keys)}`{near}")


def _checked(document: SourcedDocument, home: Home) -> Preset:
    for keys in preset_schema.endless(document.values):
        value = preset_schema.shown(_value(document.values, keys))
        raise SetupError(
            f"{document.location(keys)}: {dotted(keys)} is {value}, but must be finite"
        )
    try:
        preset = msgspec.convert(document.values, Preset)
    except msgspec.ValidationError as why:
        raise SetupError(_complaint(document, str(why))) from why
    if not NAME.fullmatch(preset.name):
        raise SetupError(
            f"{document.location(('name',))}: name is `{preset.name}`, but must be 1 to 64 "
            "letters, "
            "digits, dots, dashes or underscores, the first a letter or digit"
        )
    for keys, problem in preset_validation.violations(preset):
        raise SetupError(f"{document.location(keys)}: {dotted(keys)} {problem}")
    return preset_paths.absolute(preset, document, home)


def _complaint(document: SourcedDocument, message: str) -> str:
    what, _, where = message.partition(" - at `$")
    keys = _keys(where)
    missing = re.search(r"missing required field `(.+)`", what)
    if missing:
        keys = (*keys, missing[1])
        right = preset_schema.meaning(preset_schema.at(keys))
        return f"{document.location(keys)}: `{dotted(keys)}` is missing; it must be {right}"
    shown = preset_schema.shown(_value(document.values, keys))
    right = preset_schema.meaning(preset_schema.at(keys))
    return f"{document.location(keys)}: {dotted(keys)} is {shown}, but must be {right}"


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
