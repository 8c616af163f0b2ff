"""The tokenizer of a model folder, loaded without its weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_lm import utils as mlx_utils

from mlxstack.core.errors import SetupError
from mlxstack.models.model_files import check_folder


def load_tokenizer(folder: Path) -> Any:
    """mlx-lm's wrapper, from tokenizer files and config.json. Raises SetupError."""
    check_folder(folder)
    try:
        config = mlx_utils.load_config(folder) if (folder / "config.json").is_file() else {}
        return tokenizer_of(folder, config)
    # Libraries raise anything for odd files, and some end the program without a package of theirs.
    except (Exception, SystemExit) as error:
        why = " ".join(str(error).split())
        raise SetupError(f"the tokenizer at {folder} cannot be loaded: {why}") from error


def tokenizer_of(folder: Path, config: Mapping[str, Any]) -> Any:
    """mlx-lm's wrapper; a template that only the processor has is taken too."""
    ids, file = config.get("eos_token_id"), folder / "chat_template.json"
    tokenizer = mlx_utils.load_tokenizer(folder, eos_token_ids=ids)
    if tokenizer.has_chat_template or not file.is_file():
        return tokenizer
    own = {"chat_template": json.loads(file.read_bytes())["chat_template"]}
    return mlx_utils.load_tokenizer(folder, own, eos_token_ids=ids)
