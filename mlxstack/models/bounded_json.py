"""JSON of model folders, its numbers within bounds.

Numbers of it become loops, lists and sizes, so they are checked before anything is built of them. A
fault is a SetupError.
"""

import json
import re
import reprlib
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlxstack.core.errors import SetupError

MAX_FILE_BYTES = 32 * 1024 * 1024
"""Maximum bytes of a file; an index of 140,000 tensors takes 13 MB."""
LFS_BEGINNING = b"version https://git-lfs"
SPECIAL_FILES: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
MAX_LAYERS = 10_000
MAX_SIZE = 2**31 - 1
"""Largest value of any other size: the shapes of MLX have 32 bits."""
LAYERS = re.compile(r"\w*(layers?|blocks)")
SIZES = re.compile(r"dim|d_model|n_embd|\w*_(size|dim|rank|window|heads|experts|embeddings)")
OBJECTS = frozenset({"text_config", "quantization", "quantization_config"})
CONTEXT_KEYS = ("max_position_embeddings", "n_positions")
"""Names of the trained context; GPT-2 and its kin have the second."""
WHOLE = frozenset({"num_hidden_layers", "vocab_size", *CONTEXT_KEYS})


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises SetupError."""
    return parse_object(read_bytes(file, MAX_FILE_BYTES), file)


def read_config_object(file: Path) -> dict[str, Any]:
    """The object of a config.json, its numbers within bounds. Raises SetupError."""
    config = read_object(file)
    _check_numbers(config, file)
    return config


def parse_object(data: bytes, file: Path) -> dict[str, Any]:
    """The JSON object that came from `file`. Raises SetupError."""
    try:
        # Of bytes json takes UTF-16 and a byte order mark too, which the libraries do not.
        parsed = json.loads(data.decode())
    except RecursionError:
        raise too_deep(file) from None
    except ValueError as error:
        raise SetupError(f"{file} is not what it should be: {error}") from error
    if not isinstance(parsed, dict):
        raise SetupError(f"{file} holds no JSON object")
    return parsed


def read_bytes(file: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file.

    Raises SetupError, for a pointer of Git LFS too.
    """
    refuse_special(file)
    try:
        if (size := file.stat().st_size) > max_bytes:
            raise SetupError(
                f"{file} has {size >> 20} MiB, at most {max_bytes >> 20} are taken; choose another "
                "model"
            )
        data = file.read_bytes()
    except OSError as error:
        raise SetupError(f"{file} cannot be read: {error.strerror}") from error
    if data.startswith(LFS_BEGINNING):
        raise pointer_refusal(file)
    return data


def refuse_special(file: Path) -> None:
    """Raise SetupError for a named pipe, a device or a socket.

    Its reader may wait for ever.
    """
    try:
        mode = file.stat().st_mode
    except OSError:
        return
    kind = next((name for is_kind, name in SPECIAL_FILES if is_kind(mode)), "")
    if kind:
        raise SetupError(f"{file} is {kind}, not a file; remove it, or get the model again")


def is_lfs_pointer(file: Path) -> bool:
    """Whether a regular file is a pointer of Git LFS."""
    try:
        with file.open("rb") as stream:
            return stream.read(len(LFS_BEGINNING)) == LFS_BEGINNING
    except OSError:
        return False


def pointer_refusal(file: Path) -> SetupError:
    """Refusal of a pointer of Git LFS, with the remedy."""
    return SetupError(
        f"{file} is a pointer of Git LFS, not the file itself: run `git lfs pull` in "
        f"{file.parent}, or get the model with `mlx-stack pull`"
    )


def _check_numbers(config: dict[str, Any], file: Path) -> None:
    """Raise SetupError for a number that no model has."""
    for key, value in config.items():
        if key in OBJECTS and not isinstance(value, dict | None):
            raise SetupError(f"{file}: {key} is no object, but {reprlib.repr(value)}")
        if isinstance(value, dict):
            _check_numbers(value, file)
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key in WHOLE and value is not None and not is_number:
            raise SetupError(f"{file}: {key} is no number, but {reprlib.repr(value)}")
        most = _most(key)
        # Written so that NaN is refused too.
        if is_number and most is not None and not -MAX_SIZE <= value <= most:
            raise SetupError(f"{file}: {key} is {reprlib.repr(value)}, at most {most} is taken")


def _most(key: str) -> int | None:
    if LAYERS.fullmatch(key):
        return MAX_LAYERS
    if SIZES.fullmatch(key):
        return MAX_SIZE
    return None


def too_deep(file: Path) -> SetupError:
    """Refusal of JSON beyond the parser's depth."""
    return SetupError(f"{file} is nested too deeply to be read")
