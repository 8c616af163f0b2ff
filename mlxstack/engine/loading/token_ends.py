"""Tokens that end an answer, by files, tokenizer and chat template.

Converters leave null, text and numbers without a token in `eos_token_id`, and fine-tunes keep the
ends of their base model while their template closes turns with another token.
"""

import logging
import reprlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlxstack.core.errors import Busy, SetupError, TemplateOverrun
from mlxstack.models.bounded_json import read_object
from mlxstack.models.generation_config import FILE as GENERATION_CONFIG
from mlxstack.models.model_files import CONFIG
from mlxstack.text.assembly import template_ends

log = logging.getLogger(__name__)

KEY = "eos_token_id"
MAX_NAMED = 5
KNOWN_ENDS = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end_of_turn|>",
        "<|endoftext|>", "<|end_of_text|>", "<|END_OF_TURN_TOKEN|>", "<EOT>", "_<EOT>", "[EOT]",
        "<end_of_utterance>", "</s>", "<eos>", "[EOS]", "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)  # fmt: skip
"""Added tokens that stand for an end alone, whatever the files say, as in llama.cpp's list
(llama-vocab.cpp)."""


def set_ends(tokenizer: Any, folder: Path, n_rows: int = 0) -> None:
    """Set the end tokens of mlx-lm's wrapper.

    All are below `n_rows`; 0 stands for rows that are not known. What is left out is logged.
    """
    vocabulary = tokenizer.get_vocab()
    n_ids = n_rows or max(vocabulary.values(), default=-1) + 1
    ends = _file_ends(folder, vocabulary, n_ids)
    own = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    # Without ends in its files a model has those that mlx-lm knows for its type.
    own += [] if ends else sorted(tokenizer.eos_token_ids, key=str)
    ends |= _usable(own, "the tokenizer", vocabulary, n_ids)
    tokenizer.eos_token_ids = ends
    added = _known_ends(tokenizer, n_ids)
    if tokenizer.has_chat_template:
        # A template beyond its limits is refused by the service, which probes it for longer.
        with suppress(TemplateOverrun, Busy):
            added |= template_ends(tokenizer, n_ids)
    if missing := sorted(added - ends):
        texts = ", ".join(_text(tokenizer, token) for token in missing)
        log.info("an answer ends at %s too, which no file names as an end", texts)
        tokenizer.eos_token_ids = ends | set(missing)


def _file_ends(folder: Path, vocabulary: dict[str, int], n_ids: int) -> set[int]:
    """Ends of generation_config.json, else of config.json, as in mlx-lm."""
    for name, values in _named_ends(folder):
        if ends := _usable(values, name, vocabulary, n_ids):
            return ends
    return set()


def _named_ends(folder: Path) -> Iterator[tuple[str, list[Any]]]:
    """Files with their ends, in the order in which they count."""
    for name in (GENERATION_CONFIG, CONFIG):
        try:
            config = read_object(folder / name)
        except SetupError:
            continue
        for part in (config, config.get("text_config")):
            value = part.get(KEY) if isinstance(part, dict) else None
            if value is not None:
                yield name, value if isinstance(value, list) else [value]


def _usable(values: list[Any], source: str, vocabulary: dict[str, int], n_ids: int) -> set[int]:
    """Tokens of ends as they are written; others are logged."""
    tokens = [_token(value, vocabulary) for value in values]
    ends = {token for token in tokens if token is not None and 0 <= token < n_ids}
    left_out = [value for value, token in zip(values, tokens, strict=True) if token not in ends]
    if left_out:
        named = ", ".join(map(reprlib.repr, left_out[:MAX_NAMED]))
        named += f" and {len(left_out) - MAX_NAMED} more" if len(left_out) > MAX_NAMED else ""
        log.warning("%s: %s in %s is no token here and is left out", source, named, KEY)
    return ends


def _token(value: Any, vocabulary: dict[str, int]) -> int | None:
    """Token that a value of `eos_token_id` stands for."""
    if isinstance(value, str):
        # As mlx-lm reads it: a number in quotes is no text.
        is_number = value.isascii() and value.isdecimal()
        return int(value) if is_number else vocabulary.get(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return None


def _known_ends(tokenizer: Any, n_ids: int) -> set[int]:
    """Added tokens that are an end by their text.

    Fine-tunes add them as plain tokens too.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {id_ for id_, token in added.items() if token.content in KNOWN_ENDS and id_ < n_ids}


def _text(tokenizer: Any, token: int) -> str:
    added = tokenizer.added_tokens_decoder.get(token)
    return f"{added.content if added is not None else ''!r} ({token})"
