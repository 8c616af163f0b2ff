"""Recipe of an embedding model: what sentence-transformers does after the last layer.

Its folder names modules in order: pooling of the hidden states, dense layers, normalization. What
is not computed here is refused: a wrong vector is worse than none.
https://sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.errors import SetupError
from mlxstack.models.bounded_json import MAX_FILE_BYTES, MAX_SIZE, read_bytes, read_object
from mlxstack.models.model_files import CONFIG, check_weight_file

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
TRANSFORMER_SETTINGS = "sentence_bert_config.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"
POOLING = "1_Pooling"
"""Folder of the pooling where no modules.json names another."""
BOTH_WAYS = (
    "use_bidirectional_attention",
    "use_bidirectional",
    "bidirectional",
    "is_bidirectional",
)
ONE_WAY = ("is_causal", "causal", "causal_attention", "use_causal_mask")
BOTH_WAYS_NAME = re.compile(r"Bidirec|BiModel|BiFor|Encoder")
"""Classes of models whose authors took the causal mask away, such as LLM2Vec's."""
TEXT_ONLY_WORDS = frozenset({"vision", "none", "false", ""})
"""Values of `use_bidirectional_attention` under which text attends backwards."""


class PoolingMode(StrEnum):
    """Poolings of hidden states in the order of their concatenation."""

    CLS = "cls"
    MAX = "max"
    MEAN = "mean"
    MEAN_SQRT_LEN = "mean_sqrt_len_tokens"
    WEIGHTED_MEAN = "weightedmean"
    LAST = "lasttoken"


MODE_KEYS = {
    "pooling_mode_cls_token": PoolingMode.CLS,
    "pooling_mode_max_tokens": PoolingMode.MAX,
    "pooling_mode_mean_tokens": PoolingMode.MEAN,
    "pooling_mode_mean_sqrt_len_tokens": PoolingMode.MEAN_SQRT_LEN,
    "pooling_mode_weightedmean_tokens": PoolingMode.WEIGHTED_MEAN,
    "pooling_mode_lasttoken": PoolingMode.LAST,
}


class Activation(StrEnum):
    """Activation functions of a dense layer by PyTorch's names."""

    IDENTITY = "Identity"
    TANH = "Tanh"
    RELU = "ReLU"
    GELU = "GELU"
    SILU = "SiLU"
    SIGMOID = "Sigmoid"


class DenseLayer(Struct, frozen=True):
    """Dense layer with weights in a safetensors file."""

    file: Path
    activation: Activation = Activation.IDENTITY


class Normalization(Struct, frozen=True):
    """Division by the length of the vector."""


class EmbeddingRecipe(Struct, frozen=True):
    """Pooling modes, whose vectors are concatenated, and the modules after them.

    `prompt` stands before each text, and with `adds_end` the tokenizer's end after it; a text has
    at most `max_tokens`, 0 for any number. The default is that of embedders made of language
    models, such as Qwen3-Embedding: the state of the last token.
    """

    modes: tuple[PoolingMode, ...] = (PoolingMode.LAST,)
    modules: tuple[DenseLayer | Normalization, ...] = ()
    prompt: str = ""
    max_tokens: int = 0
    adds_end: bool = False


def embedding_recipe(folder: Path) -> EmbeddingRecipe:
    """Recipe in a model folder.

    Raises SetupError for one that is not computed here.
    """
    _refuse_both_ways(read_object(folder / CONFIG))
    plain = EmbeddingRecipe(
        prompt=_default_prompt(folder),
        max_tokens=_max_tokens(folder),
        # Transformers 5 leaves it out beside a tokenizer.json; the models were trained with it:
        # https://github.com/embeddings-benchmark/mteb/pull/5237
        adds_end=bool(_settings(folder / TOKENIZER_SETTINGS).get("add_eos_token")),
    )
    if not (folder / MODULES).is_file():
        if not (folder / POOLING / CONFIG).is_file():
            return plain
        return replace(plain, modes=_modes(folder / POOLING / CONFIG))
    modes: tuple[PoolingMode, ...] = ()
    modules: list[DenseLayer | Normalization] = []
    for kind, place in _modules(folder / MODULES):
        if kind == "Transformer" and not (modes or place):
            continue
        if kind == "Pooling" and not modes:
            modes = _modes(folder / place / CONFIG)
        elif kind == "Dense" and modes:
            modules.append(_dense(folder / place))
        elif kind == "Normalize" and modes:
            modules.append(Normalization())
        elif kind != "Dropout":
            raise SetupError(
                f"{folder / MODULES} names the module {kind} in {place or '.'}, which is not "
                "computed here in this place; choose another embedding model"
            )
    if not modes:
        raise SetupError(f"{folder / MODULES} names no pooling of the hidden states")
    return replace(plain, modes=modes, modules=tuple(modules))


def _modules(file: Path) -> list[tuple[str, str]]:
    """Kinds of the modules in their order, and folders inside the model's."""
    try:
        modules = msgspec.json.decode(read_bytes(file, MAX_FILE_BYTES), type=list[dict[str, Any]])
        ordered = sorted(modules, key=lambda module: int(module.get("idx", 0)))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise SetupError(f"{file} is not what it should be: {error}") from error
    kinds = []
    for module in ordered:
        package, _, kind = str(module.get("type")).rpartition(".")
        place = str(module.get("path") or "")
        if package.partition(".")[0] != "sentence_transformers":
            raise SetupError(
                f"{file} names the module {module.get('type')}, which is code of the folder and "
                "does not run here; choose another embedding model"
            )
        if ".." in Path(place).parts or Path(place).is_absolute():
            raise SetupError(f"{file} names a folder outside of the model: {place}")
        kinds.append((kind, place))
    return kinds


def _modes(file: Path) -> tuple[PoolingMode, ...]:
    """Modes of a pooling config.

    Raises SetupError for none, and for unknown ones.
    """
    if not file.exists():
        raise SetupError(
            f"{file} is missing, which says how hidden states become a vector; conversions leave "
            "it out: copy it from the original model"
        )
    config = read_object(file)
    named = config.get("pooling_mode")
    if isinstance(named, str):
        named = [named]
    names = named if isinstance(named, list) else []
    chosen = {MODE_KEYS.get(f"pooling_mode_{name}", name) for name in names}
    for key, value in config.items():
        if key.startswith("pooling_mode_") and value:
            chosen.add(MODE_KEYS.get(key, key))
    if unknown := sorted(str(mode) for mode in chosen if mode not in set(PoolingMode)):
        raise SetupError(f"{file}: the pooling {', '.join(unknown)} is not computed here")
    if not chosen:
        raise SetupError(f"{file} names no pooling mode")
    if config.get("include_prompt") is False:
        raise SetupError(
            f"{file}: pooling without the prompt (include_prompt) is not computed here"
        )
    return tuple(mode for mode in PoolingMode if mode in chosen)


def _dense(folder: Path) -> DenseLayer:
    """Dense layer in its folder. Raises SetupError."""
    file = folder / "model.safetensors"
    config = read_object(folder / CONFIG)
    name = str(config.get("activation_function") or "Identity").rpartition(".")[2]
    if name not in set(Activation):
        raise SetupError(f"{folder / CONFIG}: the activation {name} is not computed here")
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise SetupError(f"{folder / CONFIG}: {key} {config[key]} is not computed here")
    if not file.is_file():
        raise SetupError(
            f"{folder} holds no model.safetensors; pull the model again, or take a version of it "
            "with safetensors"
        )
    check_weight_file(file)
    return DenseLayer(file, Activation(name))


def _default_prompt(folder: Path) -> str:
    """Prompt that stands before each text by default."""
    settings = _settings(folder / SETTINGS)
    prompts = settings.get("prompts")
    name = settings.get("default_prompt_name")
    prompt: Any = ""
    if isinstance(prompts, dict) and isinstance(name, str):
        prompt = prompts.get(name)
    if not isinstance(prompt, str):
        raise SetupError(f"{folder / SETTINGS} has no prompt of the name {name!r}")
    return prompt


def _max_tokens(folder: Path) -> int:
    """Most tokens of a text, 0 for any number.

    Raises SetupError for texts in lower case.
    """
    file = folder / TRANSFORMER_SETTINGS
    settings = _settings(file)
    if settings.get("do_lower_case"):
        raise SetupError(f"{file}: texts in lower case (do_lower_case) are not made here")
    n_tokens = settings.get("max_seq_length")
    if type(n_tokens) is int and 0 < n_tokens <= MAX_SIZE:
        return n_tokens
    return 0


def _settings(file: Path) -> dict[str, Any]:
    """Object in a file, if any. Raises SetupError."""
    if file.is_file():
        return read_object(file)
    return {}


def _refuse_both_ways(config: Mapping[str, Any]) -> None:
    """Raise SetupError for a model whose tokens attend to those after them."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, dict) else {}):
        key_on = next((key for key in BOTH_WAYS if _is_on(part.get(key))), "")
        key_off = next((key for key in ONE_WAY if part.get(key) is False), "")
        listed = part.get("architectures")
        names = [str(name) for name in listed] if isinstance(listed, list) else [str(listed or "")]
        # Code of the folder, in whose place a class of mlx-lm would compute.
        if isinstance(code := part.get("auto_map"), dict):
            names += [str(name) for name in code.values()]
        name = next((name for name in names if BOTH_WAYS_NAME.search(name)), "")
        if evidence := key_on or key_off or name:
            raise SetupError(
                f"this model attends in both directions ({evidence} in config.json: "
                "bidirectional), and mlx-lm computes causal attention alone, so its vectors would "
                "be wrong; choose another embedding model"
            )


def _is_on(value: Any) -> bool:
    """Whether a setting of bidirectional attention concerns text."""
    if value is not None:
        return str(value).lower() not in TEXT_ONLY_WORDS
    return False
