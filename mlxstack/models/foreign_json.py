"""Reads JSON files of a model folder; a fault is a SetupError.

Their numbers become loops, lists and sizes, so they are bounded before anything is built of them.
"""

import json
import re
import reprlib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.core.errors import SetupError

LONGEST = 32 * 1024 * 1024
"""Maximum bytes of a file; an index of 140,000 tensors takes 13 MB."""
LONGEST_TOKENIZER = 256 * 1024 * 1024
"""Maximum bytes of a tokenizer.json; large ones take 30 MB."""
MOST_LAYERS = 10_000
LARGEST = 2**31 - 1
"""Largest value of any other size: the shapes of MLX have 32 bits."""
LARGEST_GROWTH = 64
"""Characters that the replacements of a tokenizer may make of one."""
LAYERS = re.compile(r"\w*(layers?|blocks)")
SIZES = re.compile(r"dim|d_model|n_embd|\w*_(size|dim|rank|window|heads|experts|embeddings)")
OBJECTS = frozenset({"text_config", "quantization", "quantization_config"})
WHOLE = frozenset({"num_hidden_layers", "vocab_size", "max_position_embeddings"})
READ = ("config.json", "tokenizer_config.json", "generation_config.json")


class TokenizerRules(Struct, frozen=True):
    """The parts of a tokenizer.json that replace text."""

    normalizer: Any = None
    decoder: Any = None


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises SetupError."""
    return parse_object(_bytes(file, LONGEST), file)


def read_config_object(file: Path) -> dict[str, Any]:
    """The object of a config.json, its numbers within bounds. Raises SetupError."""
    config = read_object(file)
    _check_numbers(config, file)
    return config


def parse_object(data: bytes, file: Path) -> dict[str, Any]:
    """The JSON object that came from `file`. Raises SetupError."""
    try:
        found = json.loads(data)
    except RecursionError:
        raise _too_deep(file) from None
    except ValueError as why:
        raise SetupError(f"{file} is not what it should be: {why}") from why
    if not isinstance(found, dict):
        raise SetupError(f"{file} holds no JSON object")
    return found


def check_folder(folder: Path) -> None:
    """Check the files that libraries will read. Raises SetupError."""
    for name in READ:
        file = folder / name
        if file.is_file():
            read_config_object(file) if name == READ[0] else read_object(file)
    if (file := folder / "tokenizer.json").is_file():
        _check_tokenizer(file)


def _bytes(file: Path, most: int) -> bytes:
    try:
        if (size := file.stat().st_size) > most:
            raise SetupError(
                f"{file} has {size >> 20} MiB, at most {most >> 20} are taken; choose another model"
            )
        return file.read_bytes()
    except OSError as why:
        raise SetupError(f"{file} cannot be read: {why.strerror}") from why


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
        if is_number and most is not None and not -LARGEST <= value <= most:
            raise SetupError(f"{file}: {key} is {reprlib.repr(value)}, at most {most} is taken")


def _most(key: str) -> int | None:
    if LAYERS.fullmatch(key):
        return MOST_LAYERS
    return LARGEST if SIZES.fullmatch(key) else None


def _check_tokenizer(file: Path) -> None:
    """Raise SetupError for a tokenizer that makes long texts of short ones."""
    try:
        rules = msgspec.json.decode(_bytes(file, LONGEST_TOKENIZER), type=TokenizerRules)
        growth = max(_growth(rules.normalizer), _growth(rules.decoder))
    except RecursionError:
        raise _too_deep(file) from None
    except msgspec.MsgspecError as why:
        raise SetupError(f"{file} is not what it should be: {why}") from why
    if growth > LARGEST_GROWTH:
        raise SetupError(
            f"{file} replaces a character by up to {min(growth, 10**12):.0f}, at most "
            f"{LARGEST_GROWTH} are taken; choose another model"
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
        for one in inner if isinstance(inner, list) else ():
            growth *= _growth(one)
    content, pattern = rule.get("content"), rule.get("pattern")
    if rule.get("type") == "Replace" and isinstance(content, str):
        text = pattern.get("String") if isinstance(pattern, dict) else None
        growth *= max(1.0, len(content) / max(1, len(text or "")))
    return growth


def _too_deep(file: Path) -> SetupError:
    return SetupError(f"{file} is nested too deeply to be read")
