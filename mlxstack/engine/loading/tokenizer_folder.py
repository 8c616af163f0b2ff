"""The tokenizer of a model folder, loaded without its weights."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig

from mlxstack.core.errors import Busy, SetupError, TemplateOverrun
from mlxstack.engine.loading.token_ends import set_ends
from mlxstack.engine.loading.tokenizer_wrapper import load_wrapper
from mlxstack.models.bounded_json import read_object
from mlxstack.models.folder_check import check_folder
from mlxstack.models.model_files import CONFIG
from mlxstack.text.rendering.asker import USER_TURN, TemplateAsker
from mlxstack.text.tokens.pattern_panics import is_panic
from mlxstack.text.tokens.rowless_tokens import tokens_without_rows

log = logging.getLogger(__name__)

MAX_NAMED = 5
BYTE_ORDER_MARK = "\ufeff"
TOKENIZERS = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "merges.txt")
"""Files of which a tokenizer is made."""
TEKKEN = "tekken.json"
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
    with refusals(folder):
        return tokenizer_of(folder)


@contextmanager
def refusals(folder: Path) -> Iterator[None]:
    """Errors of libraries as SetupError."""
    try:
        yield
    except SetupError:
        raise
    # Libraries raise anything for odd files, and some end the program without a package of theirs.
    except BaseException as error:
        if not isinstance(error, Exception | SystemExit) and not is_panic(error):
            raise
        raise refusal(folder, error) from error


def tokenizer_of(folder: Path, n_rows: int = 0) -> Any:
    """mlx-lm's wrapper with its end tokens.

    No Python of the folder runs: by default transformers asks the terminal whether it may. A
    template that only the processor has is taken too. `n_rows` are the rows of the embedding, 0
    where no weights are loaded.
    """
    settings = {"trust_remote_code": False, **_readable_config(folder)}
    try:
        tokenizer = load_wrapper(folder, settings)
    except StrictDataclassError as error:
        # Transformers checks all of config.json, of which a tokenizer needs the type at most.
        kind = str(read_object(folder / CONFIG).get("model_type", ""))
        log.info("config.json is not as Transformers wants it: %s", error)
        settings["config"] = PreTrainedConfig.from_dict({"model_type": kind})
        tokenizer = load_wrapper(folder, settings)
    file = folder / "chat_template.json"
    if not tokenizer.has_chat_template and file.is_file():
        template = read_object(file).get("chat_template")
        if template is not None:
            tokenizer = load_wrapper(folder, {**settings, "chat_template": template})
    template = tokenizer.chat_template
    if isinstance(template, str) and template.startswith(BYTE_ORDER_MARK):
        # Editors on Windows write it; every prompt would begin with it.
        tokenizer.chat_template = template.removeprefix(BYTE_ORDER_MARK)
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
    named = sorted({file.name for pattern in TOKENIZERS for file in folder.glob(pattern)})
    if not named:
        other = ""
        if (folder / TEKKEN).is_file():
            other = f" ({TEKKEN} is for mistral-common, which is not used here)"
        return SetupError(
            f"{folder} holds no tokenizer.json and no tokenizer.model{other}; get the model again "
            "with `mlx-stack pull`, or take an MLX version of it"
        )
    if isinstance(error, LookupError):
        reason = f"a file lacks {reason}"
    if "tokenizer.json" not in named:
        reason = f"{', '.join(named)}: {reason}; take a version of this model with a tokenizer.json"
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
