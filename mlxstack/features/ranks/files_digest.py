"""Digests of a model's files, for processes without MLX.

`python -m mlxstack.features.ranks.files_digest` reads a `ModelSpec` as JSON, and prints a
`FilesDigest`. It downloads nothing.
"""

import sys

import msgspec

from mlxstack.config.presets import BUILTIN_MODEL, is_folder
from mlxstack.core.errors import SetupError, StackError
from mlxstack.core.preset import ModelSpec
from mlxstack.engine.loading import loader
from mlxstack.features.ranks.probe import FilesDigest
from mlxstack.models import model_files


def files_digest(model: ModelSpec) -> FilesDigest:
    """The digests that ranks compare when they have loaded a model."""
    try:
        if model.id == BUILTIN_MODEL or is_folder(model.id):
            folder = loader.locate(model)
        elif (snapshot := model_files.whole_snapshot(model.id, model.revision)) is not None:
            folder = snapshot
        else:
            raise SetupError(f"{model.id} is not downloaded")
        config = model_files.read_config(folder).config
        return FilesDigest(loader.weights_digest(folder), loader.code_digest(folder, config))
    except (StackError, OSError, ValueError) as why:
        return FilesDigest(problem=str(why))


if __name__ == "__main__":
    found = files_digest(msgspec.json.decode(sys.stdin.buffer.read(), type=ModelSpec))
    sys.stdout.write(msgspec.json.encode(found).decode())
