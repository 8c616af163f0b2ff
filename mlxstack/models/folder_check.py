"""Checks of a model folder before a library reads it.

Libraries open each file by its name: a named pipe would hold them for ever, and a pointer of Git
LFS is no JSON. A fault is a SetupError.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.core.errors import SetupError
from mlxstack.models.bounded_json import (
    MAX_FILE_BYTES,
    is_lfs_pointer,
    pointer_refusal,
    read_bytes,
    read_config_object,
    read_object,
    refuse_special,
    too_deep,
)
from mlxstack.models.model_files import (
    CONFIG,
    gguf_refusal,
    refuse_gguf,
    refuse_two_models,
    weight_files,
)

MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
"""Maximum bytes of a tokenizer.json; large ones take 30 MB."""
MAX_GROWTH = 64
"""Characters that the replacements of a tokenizer may make of one."""
READ = (
    CONFIG, "tokenizer_config.json", "generation_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.json",
)  # fmt: skip
TEMPLATE = "chat_template.jinja"
FETCHED_BY_LFS = (
    "*.json", "*.jinja", "*.tiktoken", "*.model", "merges.txt", "vocab.txt", "model*.safetensors",
)  # fmt: skip
"""Files that may be pointers of Git LFS."""
OTHER_WEIGHTS = (
    "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.npz", "*.nemo",
)  # fmt: skip
"""Weights of PyTorch, TensorFlow, JAX, ONNX, and of early MLX; and of Nemo."""


class TokenizerRules(Struct, frozen=True):
    """The parts of a tokenizer.json that replace text."""

    normalizer: Any = None
    decoder: Any = None


def check_folder(folder: Path) -> None:
    """Check the files that libraries will read. Raises SetupError."""
    refuse_special_files(folder)
    _refuse_pointers(folder)
    for name in READ:
        file = folder / name
        if file.is_file():
            read_config_object(file) if name == CONFIG else read_object(file)
    if (file := folder / "tokenizer.json").is_file():
        _check_tokenizer(file)
    if (file := folder / TEMPLATE).is_file():
        _check_text(file)
    refuse_two_models(folder)


def check_startable(folder: Path) -> None:
    """Check a folder before a worker starts. Raises SetupError."""
    refuse_special_files(folder)
    refuse_gguf(folder)
    _refuse_pointers(folder)
    _refuse_other_weights(folder)


def check_weights(folder: Path) -> None:
    """Refuse a folder without weights. Raises SetupError."""
    if not weight_files(folder, "model"):
        raise SetupError(
            f"{folder} holds no weights (model*.safetensors); get the model with `mlx-stack pull`"
        )


def check_adapter(folder: Path) -> None:
    """Check the files of an adapter before mlx-lm reads them. Raises SetupError."""
    refuse_special_files(folder)
    for file in sorted(folder.glob("adapter*")):
        if is_lfs_pointer(file):
            raise pointer_refusal(file)


def refuse_special_files(folder: Path) -> None:
    """Raise SetupError for a named pipe, a device or a socket.

    It may be in the folder or one level below.
    """
    for file in _entries(folder):
        refuse_special(file)


def _entries(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.iterdir()):
        yield file
        if file.is_dir() and not file.is_symlink():
            yield from sorted(file.iterdir())


def _refuse_pointers(folder: Path) -> None:
    """Raise SetupError for a file that Git LFS has not fetched."""
    for pattern in FETCHED_BY_LFS:
        for file in sorted(folder.glob(pattern)):
            if file.is_file() and is_lfs_pointer(file):
                raise pointer_refusal(file)


def _refuse_other_weights(folder: Path) -> None:
    """Raise SetupError for weights that mlx-lm does not read."""
    if weight_files(folder, "model"):
        return
    if any(folder.glob("*.gguf")):
        raise gguf_refusal(folder)
    names = sorted(file.name for pattern in OTHER_WEIGHTS for file in folder.glob(pattern))
    names = [name for name in names if not name.startswith((".", "training_args"))]
    names += [file.name for file in weight_files(folder)]
    if names:
        more = ""
        if len(names) > 1:
            more = f" and {len(names) - 1} more"
        raise SetupError(
            f"{folder} holds {names[0]}{more}, but no model*.safetensors, which mlx-lm reads; "
            "convert it with `mlx_lm.convert`, or take an MLX version of this model, such as one "
            "of mlx-community on the hub"
        )


def _check_text(file: Path) -> None:
    """Raise SetupError for text that is not UTF-8."""
    try:
        read_bytes(file, MAX_FILE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise SetupError(f"{file} is no text in UTF-8 ({error}); get it again") from error


def _check_tokenizer(file: Path) -> None:
    """Raise SetupError for a tokenizer that makes long texts of short ones."""
    try:
        rules = msgspec.json.decode(read_bytes(file, MAX_TOKENIZER_BYTES), type=TokenizerRules)
        growth = max(_growth(rules.normalizer), _growth(rules.decoder))
    except RecursionError:
        raise too_deep(file) from None
    except msgspec.MsgspecError as error:
        raise SetupError(f"{file} is not what it should be: {error}") from error
    if growth > MAX_GROWTH:
        raise SetupError(
            f"{file} replaces a character by up to {min(growth, 10**12):.0f}, at most "
            f"{MAX_GROWTH} are taken; choose another model"
        )


def _growth(rule: Any) -> float:
    """Maximum characters that a tokenizer's rule makes of one.

    https://huggingface.co/docs/tokenizers/api/normalizers
    """
    if not isinstance(rule, dict):
        return 1.0
    growth = 1.0
    for key in ("normalizers", "decoders"):
        inner = rule.get(key)
        for part in inner if isinstance(inner, list) else ():
            growth *= _growth(part)
    content = rule.get("content")
    pattern = rule.get("pattern")
    if rule.get("type") == "Replace" and isinstance(content, str):
        text = None
        if isinstance(pattern, dict):
            text = pattern.get("String")
        growth *= max(1.0, len(content) / max(1, len(text or "")))
    return growth
