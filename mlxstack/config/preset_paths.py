"""Makes the paths of a preset absolute."""

from pathlib import Path

import msgspec

from mlxstack.config.yaml_source import Keys, SourcedDocument, dotted
from mlxstack.core.errors import SetupError
from mlxstack.core.preset import Preset, WarmPrefix
from mlxstack.host.home import Home

BUILTIN_MODEL = "demo"
"""The id of the model that comes with the package."""

FOLDER_SIGNS = ("/", "./", "../", "~")


def is_folder(model_id: str) -> bool:
    """Whether a model id is a folder (`./x`, `/x`, `~/x`)."""
    return model_id in {".", ".."} or model_id.startswith(FOLDER_SIGNS)


def expanded(path: str) -> Path:
    """The path without its `~`. Raises SetupError for an unknown user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as why:
        raise SetupError(f"cannot expand the path {path!r}: no such user") from why


def absolute(preset: Preset, document: SourcedDocument, home: Home) -> Preset:
    """The preset with every path absolute, and `slots.save_path` filled in.

    A relative path is meant from the folder of the file that holds it, or from the current
    folder when it came by option or variable.
    """

    def at(path: str | None, *keys: str | int) -> str | None:
        return None if path is None else _from(document, keys, path)

    replace = msgspec.structs.replace
    model, cache = preset.model, preset.prefix_cache
    model_id = _model(document, "id", model.id)
    others = {
        key: None if given is None else _model(document, key, given)
        for key, given in (("draft", model.draft), ("mtp", model.mtp))
    }
    save_path = at(preset.slots.save_path, "slots", "save_path")
    warm = tuple(
        _warm(document, ("prefix_cache", "warm_prefixes", n), prefix)
        for n, prefix in enumerate(cache.warm_prefixes)
    )
    return replace(
        preset,
        model=replace(model, id=model_id, adapter=at(model.adapter, "model", "adapter"), **others),
        slots=replace(preset.slots, save_path=save_path or str(home.slots / preset.name)),
        prefix_cache=replace(cache, warm_prefixes=warm),
    )


def _warm(document: SourcedDocument, keys: Keys, prefix: WarmPrefix) -> WarmPrefix:
    kinds = ("tokens_file", "text_file", "messages_file")
    given = {kind: getattr(prefix, kind) for kind in kinds if getattr(prefix, kind) is not None}
    paths = {kind: _from(document, (*keys, kind), path) for kind, path in given.items()}
    return msgspec.structs.replace(prefix, **paths)


def _model(document: SourcedDocument, key: str, model_id: str) -> str:
    return _from(document, ("model", key), model_id) if is_folder(model_id) else model_id


def _from(document: SourcedDocument, keys: Keys, path: str) -> str:
    mark = document.location(keys)
    try:
        return str((mark.folder / expanded(path)).resolve())
    except (SetupError, ValueError, OSError) as why:
        raise SetupError(f"{mark}: {dotted(keys)} is no path: {why}") from why
