"""The tokenizer of a model folder, loaded without its weights."""

from pathlib import Path
from typing import Any

from mlx_lm import utils as mlx_utils

from mlxstack.core.errors import SetupError


def load_tokenizer(folder: Path) -> Any:
    """mlx-lm's wrapper, from tokenizer files and config.json. Raises SetupError."""
    try:
        has_config = (folder / "config.json").is_file()
        config = mlx_utils.load_config(folder) if has_config else {}
        return mlx_utils.load_tokenizer(folder, eos_token_ids=config.get("eos_token_id"))
    # Some tokenizers end the program when a package of theirs is missing.
    except (OSError, ValueError, KeyError, TypeError, ImportError, SystemExit) as error:
        raise SetupError(f"the tokenizer at {folder} cannot be loaded: {error}") from error
