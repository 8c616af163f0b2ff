"""Loads models by mlx-lm, and finds their KV identity and caches."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import xxhash
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_utils
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.config.presets import BUILTIN_MODEL, expanded, is_folder
from mlxstack.core.errors import SetupError, Unsupported
from mlxstack.core.formatting import size
from mlxstack.core.model_info import Identity, ModelFacts
from mlxstack.core.preset import KVSpec, ModelSpec, scaled_context
from mlxstack.demo import MODEL_DIR
from mlxstack.engine.device import has_gpu
from mlxstack.engine.device_errors import raise_device_error
from mlxstack.engine.loading.adapters import ADAPTER, with_adapter
from mlxstack.engine.loading.embedding_tables import EmbeddingTables, embedding_tables
from mlxstack.engine.loading.hub_download import fetch
from mlxstack.engine.loading.load_errors import why_not_loaded
from mlxstack.engine.loading.tokenizer_folder import check_rows, refusals, tokenizer_of
from mlxstack.engine.model import mlx_vlm_models
from mlxstack.engine.model.mlx_vlm_models import TextModel
from mlxstack.engine.model.model_shape import folder_of_mlx_vlm, has_plain_rope, has_scaled_rope
from mlxstack.engine.model.token_inputs import PLAIN_TOKENS, TokenInputs
from mlxstack.host.load_progress import LoadProgress
from mlxstack.models.folder_check import check_adapter, check_folder
from mlxstack.models.generation_config import sampling_defaults
from mlxstack.models.model_files import (
    check_weight_file,
    identifying_files,
    n_trained_in,
    tensor_names,
    weight_files,
)
from mlxstack.models.rope_config import (
    ignored_scaling,
    n_without_scaling,
    not_scaled,
    own_scaling,
    scaled_config,
    with_flat_rope,
)
from mlxstack.store import kv_file_format

log = logging.getLogger(__name__)

CHUNK = 1 << 22
READ_AT_ONCE = 1 << 30
"""Bytes of weights that are read between two reports."""

TIED = "tie_word_embeddings"
HEADS = frozenset({"lm_head.weight", "model.lm_head.weight", "language_model.lm_head.weight"})
BLOB = re.compile(r"[0-9a-f]{64}")
QUANTIZATION = "hf_quant_config.json"
"""ModelOpt's settings, which mlx-lm reads beside config.json."""


class LoadedModel(Struct, frozen=True):
    """Model in memory with its tokenizer (mlx-lm's wrapper) and facts."""

    model: Any
    tokenizer: Any
    facts: ModelFacts
    inputs: TokenInputs = PLAIN_TOKENS
    """Inputs of its prompts beside tokens."""


def load(
    spec: ModelSpec,
    kv: KVSpec,
    progress: LoadProgress | None = None,
    *,
    divide: Callable[[Any], None] | None = None,
) -> LoadedModel:
    """Load weights and tokenizer on the calling thread. Raises SetupError.

    `divide` leaves a part of the model, whose weights alone are read then.

    On a machine without a GPU, half-precision weights are widened to float32: MLX multiplies
    half-precision matrices on a CPU an order of magnitude slower.
    """
    progress = progress or LoadProgress()
    path = locate(spec, progress)
    check_folder(path)
    if spec.adapter is not None:
        check_adapter(Path(spec.adapter))
    for file in weight_files(path, "model"):
        check_weight_file(file)
    n_bytes = sum(file.stat().st_size for file in weight_files(path, "model"))
    progress.report(f"loading {spec.id}, {size(n_bytes)} of weights")
    try:
        model, config = _model_of(spec, path)
        if not has_gpu():
            model.set_dtype(mx.float32)
        if divide is None:
            read_weights(model, progress)
    except SetupError:
        raise
    # Model files raise anything, and end the program when a package of theirs is missing.
    except (Exception, SystemExit) as error:
        raise_device_error(error)
        raise SetupError(
            f"the model {spec.id} at {path} cannot be loaded: {why_not_loaded(path, error)}"
        ) from error
    tables = embedding_tables(model)
    with refusals(path):
        tokenizer = tokenizer_of(path, tables.n_rows)
        if tables.n_rows:
            check_rows(spec.id, tokenizer, tables.n_rows)
    if spec.rope is not None and not has_scaled_rope(model):
        raise SetupError(not_scaled(str(config.get("model_type", ""))))
    if spec.adapter is not None:
        model = with_adapter(model, spec)
    if divide is not None:
        divide(model)
    if not has_gpu():
        model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    facts = _facts(spec, kv, path, config, model, tokenizer, tables, progress)
    return LoadedModel(model, tokenizer, facts)


def _model_of(spec: ModelSpec, path: Path) -> tuple[Any, dict[str, Any]]:
    """Model whose weights are not read yet, and its config."""
    plain = mlx_utils.load_config(path)
    try:
        is_more = folder_of_mlx_vlm(plain) is not None
    except Unsupported as refused:
        raise SetupError(refused.message) from refused
    if is_more:
        if spec.rope is not None or spec.adapter is not None:
            raise SetupError(
                f"model.rope and model.adapter are for types of mlx-lm, and {spec.id} is of type "
                f"'{plain['model_type']}', which mlx-vlm serves"
            )
        return mlx_vlm_models.load(path), plain
    scaled = scaled_config(plain, spec.rope) if spec.rope else plain
    model, config = mlx_utils.load_model(
        path,
        lazy=True,
        model_config=with_own_head(with_flat_rope(scaled), path),
        trust_remote_code=spec.trust_remote_code,
    )
    _check_types(model)
    return model, config


def with_own_head(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Config that names the output head of the weights.

    Without `tie_word_embeddings` some types of mlx-lm drop it, and take the embedding.
    """
    text = config.get("text_config") or config
    if isinstance(text.get(TIED), bool) or isinstance(config.get(TIED), bool):
        return config
    if HEADS.isdisjoint(tensor_names(path)):
        return config
    if text is config:
        return {**config, TIED: False}
    return {**config, TIED: False, "text_config": {**text, TIED: False}}


def _check_types(model: Any) -> None:
    """Raise SetupError for weights that MLX misreads.

    It takes 8-bit floats for integers, and multiplies those.
    """
    for name, module in model.named_modules():
        weight = module.get("weight")
        if not isinstance(weight, mx.array) or mx.issubdtype(weight.dtype, mx.floating):
            continue
        if not any("scale" in key for key in module):
            raise SetupError(
                f"the weights of {name} are numbers of a type that mlx-lm does not read (whole "
                "numbers, or 8-bit floats without scales); take an MLX version of this model, or "
                "one in bfloat16"
            )


def read_weights(model: Any, progress: LoadProgress) -> None:
    """Evaluate the weights, some of them at a time."""
    arrays = [array for _, array in tree_flatten(model.parameters())]
    n_total = sum(array.nbytes for array in arrays)
    n_read = 0
    pending: list[mx.array] = []
    n_pending = 0
    for array in arrays:
        pending.append(array)
        n_pending += array.nbytes
        if n_pending >= READ_AT_ONCE or array is arrays[-1]:
            mx.eval(pending)
            n_read += n_pending
            progress.report_seldom(f"reading the weights: {size(n_read)} of {size(n_total)}")
            pending.clear()
            n_pending = 0


def check_context(facts: ModelFacts, n_ctx: int, key: str = "") -> None:
    """Raise SetupError for slots longer than the table of learned positions."""
    if 0 < facts.n_positions < n_ctx:
        raise SetupError(
            f"{key}slots.n_ctx is {n_ctx}, but {facts.id} has {facts.n_positions} positions, each "
            f"of which it learned: lower slots.n_ctx (--ctx) to {facts.n_positions}"
        )


def locate(spec: ModelSpec, progress: LoadProgress | None = None) -> Path:
    """Folder of the model: embedded, local, or the hub's snapshot.

    Raises SetupError when there is no such model.
    """
    local = local_folder(spec.id)
    if local is not None and not (local / "config.json").is_file():
        raise SetupError(f"the folder {local} holds no config.json, so it is no model")
    return local or fetch(spec, progress or LoadProgress())


def local_folder(name: str, key: str = "") -> Path | None:
    """Folder of a model's name, None for a hub id. Raises SetupError."""
    local = MODEL_DIR if name == BUILTIN_MODEL else expanded(name)
    if local.is_dir():
        return local
    if is_folder(name):
        raise SetupError(f"{key}there is no folder {local}; give a model folder or a hub id")
    return None


def kv_identity(
    identity: Identity, kinds: str, kv: KVSpec, rank: int = 0, size: int = 1
) -> Identity:
    """Identity of KV in caches of these kinds, for one rank."""
    precision = f"{kv.bits}/{kv.group_size}@{kv.quantized_start}" if kv.bits < 16 else "16"
    shard_name = f" rank {rank} of {size}" if size > 1 else ""
    return replace(identity, kv=f"{precision} {kinds}{shard_name}")


def weights_digest(path: Path, progress: LoadProgress | None = None) -> str:
    """Digest of all weight files, from hub blob names if any."""
    digest = xxhash.xxh3_128()
    progress = progress or LoadProgress()
    for file in identifying_files(path):
        kv_file = file.resolve().name
        digest.update(file.name.encode())
        progress.report_seldom(f"hashing {file.name}")
        digest.update(kv_file.encode() if BLOB.fullmatch(kv_file) else _bytes_digest(file))
    digest.update(json.dumps(mlx_utils.load_config(path), sort_keys=True, default=str).encode())
    return digest.hexdigest()


def code_digest(path: Path, config: dict[str, Any]) -> str:
    """Digest of the model's Python code and ModelOpt settings, or "".

    The file that config.json names may import any other Python file of the folder.
    """
    files = {path / QUANTIZATION}
    if config.get("model_file"):
        files |= {path / str(config["model_file"]), *path.rglob("*.py")}
    sources = sorted(file for file in files if file.is_file())
    digest = xxhash.xxh3_128()
    for file in sources:
        digest.update(str(file.relative_to(path)).encode() + b"\0" + _bytes_digest(file))
    return digest.hexdigest() if sources else ""


def adapter_digest(path: Path) -> str:
    """A digest of the files of an adapter."""
    digest = xxhash.xxh3_128()
    for name in ADAPTER:
        digest.update(_bytes_digest(path / name))
    return digest.hexdigest()


def _bytes_digest(file: Path) -> bytes:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.digest()


def _facts(
    spec: ModelSpec,
    kv: KVSpec,
    path: Path,
    config: dict[str, Any],
    model: Any,
    tokenizer: Any,
    tables: EmbeddingTables,
    progress: LoadProgress,
) -> ModelFacts:
    text = config.get("text_config") or config
    parameters = [p for _, p in tree_flatten(model.parameters())]
    code = code_digest(path, config) + (f" rope {spec.rope}" if spec.rope else "")
    if config != mlx_utils.load_config(path) and not spec.rope:
        # KV of earlier checkouts, which read config.json as mlx-lm does, differs.
        code += " config"
    if isinstance(model, TextModel):
        code += f" mlx-vlm {model.revision}"
    identity = Identity(
        model=spec.id,
        weights=weights_digest(path, progress),
        adapter=adapter_digest(Path(spec.adapter)) if spec.adapter else "",
        kv_bits=kv.bits,
        code=code,
        mlx_lm=mlx_lm.__version__,
        kv_format=kv_file_format.VERSION,
    )
    return ModelFacts(
        id=spec.alias or spec.id,
        path=str(path),
        identity=identity,
        architecture=str(config.get("model_type", "")),
        n_vocab=tables.n_rows or int(text.get("vocab_size") or tokenizer.vocab_size),
        n_positions=tables.n_positions,
        n_ctx_train=_n_ctx_train(spec, config, model),
        n_params=sum(p.size for p in parameters),
        n_bytes=sum(p.nbytes for p in parameters),
        eos=frozenset(tokenizer.eos_token_ids),
        defaults=sampling_defaults(path),
    )


def _n_ctx_train(spec: ModelSpec, config: dict[str, Any], model: Any) -> int:
    """Trained context.

    Raises SetupError for a model that was trained with a scaling that its code ignores.
    """
    kind = own_scaling(config)
    if spec.rope is not None or not kind or not has_plain_rope(model):
        return scaled_context(n_trained_in(config), spec)
    architecture = str(config.get("model_type", ""))
    n_ctx = n_without_scaling(config)
    if not n_ctx:
        raise SetupError(ignored_scaling(architecture, kind))
    log.warning(
        "mlx-lm ignores the scaling of the rotary embedding (%s) in config.json for models of "
        "type '%s': %s is good for %s tokens", kind, architecture, spec.id, n_ctx,
    )  # fmt: skip
    return n_ctx
