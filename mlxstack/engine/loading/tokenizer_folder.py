"""The tokenizer of a model folder, loaded without its weights."""

from pathlib import Path
from typing import Any

from mlx_lm import utils as mlx_utils

from mlxstack.core.errors import SetupError
from mlxstack.models.model_files import check_folder


def load_tokenizer(folder: Path) -> Any:
    """mlx-lm's wrapper, from tokenizer files and config.json. Raises SetupError."""
    check_folder(folder)
    try:
        has_config = (folder / "config.json").is_file()
        config = mlx_utils.load_config(folder) if has_config else {}
        return mlx_utils.load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))
    # Libraries raise anything for odd files, and some end the program without a package of theirs.
    except (Exception, SystemExit) as error:
        raise SetupError(f"the tokenizer at {folder} cannot be loaded: {error}") from error
