"""The tokenizer of a model folder, loaded without its weights."""

import json
import logging
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from mlxstack.core.errors import Busy, SetupError, TemplateOverrun
from mlxstack.engine.loading.token_ends import set_ends
from mlxstack.engine.loading.tokenizer_wrapper import load_wrapper
from mlxstack.models.bounded_json import read_object
from mlxstack.models.folder_check import check_folder
from mlxstack.models.model_files import CONFIG
from mlxstack.text.rendering.asker import USER_TURN, TemplateAsker
from mlxstack.text.tokens.rowless_tokens import tokens_without_rows

log = logging.getLogger(__name__)

MAX_NAMED = 5
SYSTEM = {"role": "system", "content": "System sentinel."}
ANSWER = {"role": "assistant", "content": "Answer sentinel."}
KEY = {"type": "string", "description": "A key."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A probe.",
            "parameters": {"type": "object", "properties": {"key": KEY}, "required": []},
        },
    }
    for name in ("first", "second")
]


def load_tokenizer(folder: Path) -> Any:
    """mlx-lm's wrapper, from tokenizer files and config.json. Raises SetupError."""
    check_folder(folder)
    try:
        return tokenizer_of(folder)
    # Libraries raise anything for odd files, and some end the program without a package of theirs.
    except (Exception, SystemExit) as error:
        raise refusal(folder, error) from error


def tokenizer_of(folder: Path, n_rows: int = 0) -> Any:
    """mlx-lm's wrapper with its end tokens.

    No Python of the folder runs: by default transformers asks the terminal whether it may. A
    template that only the processor has is taken too. `n_rows` are the rows of the embedding, 0
    where no weights are loaded.
    """
    settings = {"trust_remote_code": False, **_readable_config(folder)}
    tokenizer = load_wrapper(folder, settings)
    file = folder / "chat_template.json"
    if not tokenizer.has_chat_template and file.is_file():
        template = json.loads(file.read_bytes())["chat_template"]
        tokenizer = load_wrapper(folder, {**settings, "chat_template": template})
    set_ends(tokenizer, folder, n_rows)
    return tokenizer


def _readable_config(folder: Path) -> dict[str, Any]:
    """Config for transformers, which refuses odd ids; none where it takes config.json."""
    if not (folder / CONFIG).is_file():
        return {}
    config = read_object(folder / CONFIG)
    readable = _without_odd_ids(config)
    if readable == config:
        return {}
    kind = str(config.get("model_type", ""))
    # A lazy mapping, whose `get` finds nothing.
    if kind in CONFIG_MAPPING:
        return {"config": CONFIG_MAPPING[kind].from_dict(readable)}
    return {"config": PreTrainedConfig.from_dict(readable)}


def _without_odd_ids(config: dict[str, Any]) -> dict[str, Any]:
    readable = {
        key: value for key, value in config.items()
        if not key.endswith("_token_id") or _are_ids(value)
    }  # fmt: skip
    if isinstance(inner := readable.get("text_config"), dict):
        readable["text_config"] = _without_odd_ids(inner)
    return readable


def _are_ids(value: Any) -> bool:
    values = value if isinstance(value, list) else [value]
    return value is None or all(type(item) is int for item in values)


def refusal(folder: Path, error: BaseException) -> SetupError:
    """Refusal of a tokenizer by the error of a library."""
    reason = " ".join(str(error).split())
    if "trust_remote_code" in reason:
        return SetupError(
            f"the tokenizer at {folder} is Python code of the folder (`auto_map`), which does not "
            "run here; take a version of this model with a tokenizer.json"
        )
    return SetupError(f"the tokenizer at {folder} cannot be loaded: {reason}")


def check_rows(name: str, tokenizer: Any, n_rows: int) -> None:
    """Compare a tokenizer with the rows of the embedding.

    Added tokens without a row are logged, and requests with them are refused. Raises SetupError for
    those that the chat template writes, and for others: the tokenizer is of another model.
    """
    rowless = tokens_without_rows(tokenizer, n_rows)
    if not rowless:
        return
    fault = (
        f"{len(rowless)} tokens of the tokenizer of {name} have no row in its weights, which have "
        f"{n_rows}: {_named(rowless, sorted(rowless))}"
    )
    if rowless.keys() - getattr(tokenizer, "added_tokens_decoder", {}).keys():
        raise SetupError(
            f"{fault}; tokenizer and weights do not belong together: get the model again"
        )
    if written := sorted(rowless.keys() & _template_tokens(tokenizer)):
        raise SetupError(
            f"{fault}; the chat template writes {_named(rowless, written)}: take a version of this "
            "model whose weights were resized, or whose template does without"
        )
    log.warning("%s; requests with one of them are refused", fault)


def _named(texts: dict[int, str], tokens: list[int]) -> str:
    named = [f"{texts[token]!r} ({token})" for token in tokens[:MAX_NAMED]]
    return ", ".join([*named, "..."] if len(tokens) > MAX_NAMED else named)


def _template_tokens(tokenizer: Any) -> set[int]:
    """Tokens that the template writes around a plain conversation."""
    if not tokenizer.has_chat_template:
        return set()
    tokens: set[int] = set()
    try:
        asker = TemplateAsker(tokenizer, TOOLS)
        for turns in (
            [SYSTEM, USER_TURN, ANSWER, USER_TURN],
            [USER_TURN, ANSWER, USER_TURN],
            [USER_TURN],
        ):
            text = asker.text(turns) or ""
            tokens |= set(tokenizer.encode(text, add_special_tokens=False))
    except (TemplateOverrun, Busy):
        # Refused by the service, which probes it for longer.
        return tokens
    return tokens
