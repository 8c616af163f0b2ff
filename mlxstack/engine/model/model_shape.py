"""Model shape from config.json, by building mlx-lm's class lazily.

MLX is lazy: the class is built and called, arrays have shapes, and nothing is computed. Run as
`python -P FILE` it reads a JSON list of configs from stdin, and answers with a list of shapes.
"""

import ast
import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from mlx import nn
from mlx.utils import tree_flatten

from mlxstack.core.errors import Unsupported
from mlxstack.host.installer import install_command
from mlxstack.models.mtp_layouts import has_stored_table, is_of_table, with_table
from mlxstack.models.rope_config import own_scaling, with_flat_rope
from mlxstack.policy.memory.capacity import (
    Division,
    Geometry,
    Layer,
    LayerKind,
    ModelShape,
    ShapeReply,
    Weights,
)
from mlxstack.text.limited_process import limit_cpu, limit_memory

Config = Mapping[str, Any]

PACKAGE = "mlx_lm"
REMAPPINGS = ("MODEL_REMAPPING", "MODEL_ARCHITECTURE_REMAPPING")
READABLE = frozenset(
    {"awq", "bitnet", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4", "mxfp8"}
)
"""Methods of `quantization_config` that mlx-lm's loader reads; it ignores others."""
MODES = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}
"""Group size and bits of MLX's modes, where a config has null for them."""
N_MEASURED = 1024
"""Tokens of the pass that measures caches of unknown classes."""
MISSING = re.compile(r"missing \d+ required positional arguments?: (.+)")
WIDTHS = (
    ("hidden_size", "n_embd", "dim", "d_model"),
    ("num_attention_heads", "n_head", "n_heads"),
    ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
)
"""Config names of hidden size, query heads and MLP size."""


def shape_of_config(config: Config) -> ModelShape:
    """Build the model of a parsed config.json without allocating anything.

    Raises Unsupported for a type that mlx-lm lacks, a config that is not whole, and a model that
    this machine cannot build.
    """
    kind = str(config.get("model_type", ""))
    try:
        model, args = _built(config)
        with _uncomputed(model):
            return _shape(config, model, args)
    except Unsupported:
        raise
    except KeyError as missing:
        raise Unsupported(
            f"config.json of type '{kind}' lacks {missing}, which mlx-lm needs", "config.json"
        ) from None
    # Some model files end the program when a package of theirs is missing.
    except (Exception, SystemExit) as error:
        if argument := MISSING.search(str(error)):
            raise Unsupported(
                f"config.json of type '{kind}' lacks {argument[1]}, which mlx-lm needs",
                "config.json",
            ) from error
        reason = str(error).partition("__init__() ")[2] or str(error) or type(error).__name__
        raise Unsupported(
            f"mlx-lm cannot build a model of type '{kind}' from this config.json: {reason}",
            "config.json",
        ) from error


def division_of(model: Any) -> Division:
    """Division by mlx-lm: of the heads, else of the layers."""
    if hasattr(model, "shard"):
        return Division.TENSOR
    has_stages = hasattr(getattr(model, "model", None), "pipeline")
    return Division.PIPELINE if has_stages else Division.NONE


def has_scaled_rope(model: nn.Module) -> bool:
    """Whether a rotary embedding of the model is scaled, by a factor or by wavelength."""
    # By name: the program does not import mlx-lm as a package.
    return any(
        "Yarn" in type(module).__name__ or (type(module) is nn.RoPE and module.scale != 1)
        for _, module in model.named_modules()
    )


def has_plain_rope(model: nn.Module) -> bool:
    """Whether all rotary embeddings are unscaled, if any."""
    names = ("rope", "rotary")
    ropes = [
        module
        for _, module in model.named_modules()
        if any(name in type(module).__name__.lower() for name in names)
    ]
    return bool(ropes) and all(type(rope) is nn.RoPE and rope.scale == 1 for rope in ropes)


def _shape(config: Config, model: Any, args: Any) -> ModelShape:
    own = mx.float32 if _is_single(config) else mx.bfloat16
    model.set_dtype(own)
    weights = None if _is_repacked(config) else _weights(model, config)
    hidden, n_heads, inner = _widths(args, config)
    head = _head(model, hidden)
    layers, n_vocab = _layers(model, config, own.size)
    model.set_dtype(mx.float32)
    widened, _ = _layers(model, config, mx.float32.size)
    has_sinks = any("sink" in path.rpartition(".")[2] for path, _ in _parameters(model))
    return ModelShape(
        geometry=Geometry(layers, own.size, has_sinks=has_sinks),
        widened=Geometry(widened, mx.float32.size, has_sinks=has_sinks),
        weights=weights,
        hidden=hidden,
        n_heads=n_heads,
        inner=inner or 4 * hidden,
        n_vocab=n_vocab,
        division=division_of(model),
        has_scaled_rope=has_scaled_rope(model),
        head=head,
        ignored_scaling=own_scaling(config) if has_plain_rope(model) else "",
    )


@contextmanager
def _uncomputed(model: Any) -> Iterator[None]:
    """Let a pass of a model of mlx-vlm compute nothing.

    It may ask for parts of it at once.
    """
    if not type(model).__module__.endswith("mlx_vlm_models"):
        yield
        return
    ordered = mx.eval, mx.async_eval
    mx.eval = mx.async_eval = lambda *_: None
    try:
        yield
    finally:
        mx.eval, mx.async_eval = ordered


def _built(config: Config) -> tuple[Any, Any]:
    plain = msgspec.json.decode(msgspec.json.encode(dict(config)))
    name = _module_name(config)
    method = _quantization_method(config)
    if method not in {None, *READABLE}:
        raise Unsupported(
            f"mlx-lm reads no weights that {method} quantized; take an MLX version of this model, "
            "such as one of mlx-community",
            "quantization_config",
        )
    if folder := folder_of_mlx_vlm(config):
        model, args = _more_models().built(folder, with_table(plain))
        return model, args
    module = importlib.import_module(f"{PACKAGE}.models.{name}")
    args = module.ModelArgs.from_dict(with_flat_rope(plain))
    return module.Model(args), args


def _quantization_method(config: Config) -> Any:
    """Method of `quantization_config`, which loaders read where `quantization` says nothing."""
    section = config if "quantization_config" in config else config.get("text_config") or {}
    table = section.get("quantization_config")
    if config.get("quantization") is not None or not isinstance(table, Mapping):
        return None
    return table.get("quant_method")


def folder_of_mlx_vlm(config: Config) -> str | None:
    """Folder of mlx-vlm that has this type.

    None where mlx-lm has it, or the model its own code. Raises Unsupported where neither has it.
    """
    if _is_of_mlx_lm(config):
        return None
    more = _more_models()
    folder: str | None = more.folder_of(config)
    if folder is None:
        raise Unsupported(_no_library(config, more), "model_type")
    return folder


def _is_of_mlx_lm(config: Config) -> bool:
    """Whether mlx-lm has this type, or the model its own code."""
    if config.get("model_file"):
        return True
    try:
        return importlib.util.find_spec(f"{PACKAGE}.models.{_module_name(config)}") is not None
    except (ModuleNotFoundError, ValueError):
        # The name of a type may be anything.
        return False


def _no_library(config: Config, more: Any) -> str:
    """Why no library has this type, and which one may."""
    if not config.get("model_type"):
        return "config.json lacks 'model_type', so no library can load it; get it again"
    refusal = f"models of type '{config.get('model_type', '')}' are not in mlx-lm {_version()}"
    if more.is_installed():
        return f"{refusal} and not in mlx-vlm {more.version()}"
    return f"{refusal}; mlx-vlm has more types, which `{install_command(more.EXTRA)}` adds"


def _more_models() -> Any:
    # Needed for types that mlx-lm lacks only; the package of the engine is not imported here.
    return importlib.import_module("mlxstack.engine.model.mlx_vlm_models")


def _module_name(config: Config) -> str:
    """The file in `mlx_lm/models`, chosen as mlx-lm's loader does."""
    kind = str(config.get("model_type", ""))
    by_type, by_architecture = _remappings()
    architectures = config.get("architectures") or ()
    names = (architectures,) if isinstance(architectures, str) else architectures
    module = next((by_architecture[kind, n] for n in names if (kind, n) in by_architecture), None)
    return str(module or by_type.get(kind, kind))


@functools.cache
def _remappings() -> tuple[dict[str, str], dict[tuple[str, str], str]]:
    """Remapping tables of mlx-lm's loader, parsed: an import takes seconds."""
    folder = next(iter(_package().submodule_search_locations or ()))
    tree = ast.parse(Path(folder, "utils.py").read_text("utf-8"))
    tables = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in REMAPPINGS
    }
    return tables.get(REMAPPINGS[0], {}), tables.get(REMAPPINGS[1], {})


def _package() -> ModuleSpec:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise Unsupported("mlx-lm is not installed, so the planner gives no number")
    return spec


def _version() -> str:
    from importlib.metadata import version  # noqa: PLC0415 - needed for a refusal only

    return version("mlx-lm")


def _layers(model: Any, config: Config, n_each: int) -> tuple[tuple[Layer, ...], int]:
    """Every cache after two tokens, and the size of the vocabulary."""
    cache = importlib.import_module(f"{PACKAGE}.models.cache")
    caches = cache.make_prompt_cache(model)
    logits = model(mx.array([[0, 0]]), cache=caches)
    rank = _flat(config).get("kv_lora_rank")
    if any(_has_own_state(leaf) for leaf in _leaves(caches)):
        layers = _measured(model, caches, rank, n_each)
    else:
        layers = [_layer(leaf, rank) for leaf in _leaves(caches)]
    n_shared = max(0, len(getattr(model, "layers", ())) - len(caches))
    return (*layers, *[Layer(LayerKind.SHARED)] * n_shared), int(logits.shape[-1])


def _leaves(caches: Any) -> Iterator[Any]:
    for cache in caches:
        yield from _leaves(cache.caches) if type(cache).__name__ == "CacheList" else (cache,)


def _has_own_state(leaf: Any) -> bool:
    return type(leaf).__module__.startswith("mlx_vlm.")


def _measured(model: Any, caches: Any, rank: int | None, n_each: int) -> list[Layer]:
    """Layers, of which caches of mlx-vlm grow by what a pass adds.

    `n_each` are the bytes of a number of KV. Beside KV a cache may hold integers of other sizes.
    """
    before = [_n_state_bytes(leaf) for leaf in _leaves(caches)]
    model(mx.zeros((1, N_MEASURED), mx.int32), cache=caches)
    return [
        Layer(LayerKind.LATENT, 1, -(-(_n_state_bytes(leaf) - n_before) // (N_MEASURED * n_each)))
        if _has_own_state(leaf)
        else _layer(leaf, rank)
        for leaf, n_before in zip(_leaves(caches), before, strict=True)
    ]


def _n_state_bytes(leaf: Any) -> int:
    """Bytes of the arrays of a cache."""
    if not _has_own_state(leaf):
        return 0
    return sum(a.nbytes for _, a in tree_flatten(leaf.state) if isinstance(a, mx.array))


def _layer(leaf: Any, rank: int | None) -> Layer:
    match type(leaf).__name__:
        case "ArraysCache" | "RecurrentCache":
            arrays = [state for state in leaf.cache if state is not None]
            return Layer(LayerKind.RECURRENT, state_bytes=sum(state.nbytes for state in arrays))
        case "RotatingKVCache":
            kind = LayerKind.SLIDING
            window = int(leaf.max_size)
        case "ChunkedKVCache":
            kind = LayerKind.CHUNKED
            window = int(leaf.chunk_size)
        case "KVCache":
            kind = LayerKind.FULL
            window = 0
        case other:
            raise Unsupported(f"its KV is kept in {other}, which the planner does not know")
    if leaf.keys is None:
        return Layer(LayerKind.SHARED)
    (_, k_heads, _, k_dim), (_, v_heads, _, v_dim) = leaf.keys.shape, leaf.values.shape
    if kind is LayerKind.FULL and k_heads == 1 and rank in {k_dim, k_dim + v_dim}:
        kind = LayerKind.LATENT
    return Layer(kind, k_heads, k_dim, v_heads, v_dim, window)


def _weights(model: Any, config: Config) -> Weights | None:
    """Numbers of the parameters once quantized as the config says.

    None where it says what MLX does not compute. Loaders need its keys, and take storage from
    the files.
    """
    table = config.get("quantization")
    if isinstance(table, Mapping):
        sizes = table["group_size"], table["bits"]
        try:
            _quantize(model, table, str(table.get("mode") or "affine"), *sizes)
        except (TypeError, ValueError):
            return None
    return _sums(model, has_table=not has_stored_table(config))


def _quantize(model: Any, table: Mapping[str, Any], mode: str, group_size: Any, bits: Any) -> None:
    """Quantize a model as mlx-lm's converter. Raises TypeError, ValueError for odd sizes."""
    whole_group, whole_bits = MODES.get(mode, MODES["affine"])
    group = int(group_size or whole_group)
    nn.quantize(
        model,
        group,
        int(bits or whole_bits),
        mode=mode,
        class_predicate=lambda path, module: _precision(model, table, group, path, module),
    )


def _head(model: Any, hidden: int) -> Weights:
    """Weights of an MTP head: a layer with attention, and a projection."""
    layers = [layer for layer in getattr(model, "layers", ()) if "self_attn" in layer]
    if layers:
        return _sums(layers[-1]).plus(Weights(n_half=2 * hidden**2))
    return Weights()


def _sums(model: Any, *, has_table: bool = True) -> Weights:
    """Numbers of the parameters by storage; `has_table` counts n-gram tables."""
    sums = {1: 0, 2: 0, 4: 0}
    packed = 0
    for name, array in _parameters(model):
        if not has_table and is_of_table(name):
            continue
        if mx.issubdtype(array.dtype, mx.floating):
            sums[array.dtype.size] += array.size
        else:
            packed += array.nbytes
    return Weights(packed=packed, n_half=sums[2], n_single=sums[4])


def _precision(
    model: Any, table: Mapping[str, Any], group_size: int, path: str, module: Any
) -> bool | dict[str, Any]:
    """Storage of a module by mlx-lm's converter, with exceptions by path."""
    key = next((key for key in table if path == key or path.endswith(f".{key}")), None)
    if key is not None:
        exact = table[key]
        return dict(exact) if isinstance(exact, Mapping) else bool(exact)
    if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group_size:
        return False
    predicate = getattr(model, "quant_predicate", None)
    return True if predicate is None else predicate(path, module)


def _is_repacked(config: Config) -> bool:
    """Whether the loader repacks weights in ways that config omits."""
    text = config.get("text_config") or {}
    tables = [section.get("quantization_config") for section in (config, text)]
    return config.get("quantization") is None and tables != [None, None]


def _is_single(config: Config) -> bool:
    text = _flat(config)
    return str(text.get("torch_dtype", text.get("dtype", "bfloat16"))).endswith("float32")


def _flat(config: Config) -> dict[str, Any]:
    return {**config, **(config.get("text_config") or {})}


def _parameters(model: Any) -> list[tuple[str, mx.array]]:
    parameters: list[tuple[str, mx.array]] = tree_flatten(model.parameters())
    return parameters


def _widths(args: Any, config: Config) -> list[int]:
    """Widths by `WIDTHS`, with mlx-lm's defaults; 0 without one."""
    inner = getattr(args, "text_config", None)
    if not isinstance(inner, Mapping):
        inner = getattr(inner, "__dict__", {})
    settings = {**vars(args), **_flat(config), **inner}
    widths = [next((settings[key] for key in keys if settings.get(key)), 0) for keys in WIDTHS]
    return [max(value) if isinstance(value, list) else int(value) for value in widths]


def _answer() -> None:
    """Answer configs on stdin, within CPU seconds and bytes of argv."""
    # mlx-lm's own __init__ imports transformers, which takes seconds; its models need none of it.
    sys.modules[PACKAGE] = importlib.util.module_from_spec(_package())
    replies = []
    configs = msgspec.json.decode(sys.stdin.buffer.read(), type=list[dict[str, Any]])
    limit_cpu(float(sys.argv[1]))
    limit_memory(int(sys.argv[2]))
    if not all(_is_of_mlx_lm(config) for config in configs):
        # The engine's package refuses to be imported after models of mlx-lm.
        _more_models()
    for config in configs:
        try:
            replies.append(ShapeReply(shape=shape_of_config(config)))
        except Unsupported as error:
            replies.append(ShapeReply(refusal=error.message, param=error.param or ""))
    sys.stdout.buffer.write(msgspec.json.encode(replies))


if __name__ == "__main__":
    _answer()
