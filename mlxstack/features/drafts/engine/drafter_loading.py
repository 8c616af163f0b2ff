"""Loads DFlash, DFlash2 and EAGLE-3 drafters.

Their classes are mlx-vlm's, which is imported for them alone.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import initialize_rope

from mlxstack.core.errors import SetupError
from mlxstack.engine.decode.batching_check import BatchingCheck
from mlxstack.engine.device import has_gpu
from mlxstack.engine.loading.loader import LoadedModel
from mlxstack.engine.model import mlx_vlm_models
from mlxstack.engine.model.mlx_vlm_models import TextModel
from mlxstack.engine.model.runner import ModelParts
from mlxstack.features.drafts.engine.block_drafter import BlockDrafter
from mlxstack.features.drafts.engine.block_model import BlockModel
from mlxstack.features.drafts.engine.draft_model import DraftModel
from mlxstack.features.drafts.engine.eagle_head import EagleHead
from mlxstack.features.drafts.engine.layer_taps import LayerTaps
from mlxstack.features.drafts.engine.mtp_drafter import MTPDrafter
from mlxstack.features.drafts.engine.mtp_head import parts_of
from mlxstack.host.installer import install_command
from mlxstack.models.drafter_configs import EAGLE_LAYER, DrafterKind, eagle_config
from mlxstack.models.model_files import weight_files

DRAFTERS = "mlx_vlm.speculative.drafters"
MODULES = {
    DrafterKind.DFLASH: "qwen3_dflash",
    DrafterKind.DFLASH2: "dflash2",
    DrafterKind.EAGLE3: "eagle3",
}
OF_TARGET = ("t2d", "verifier_")
"""Beginnings of tensors that say something of the target, and are not used."""

BROKEN = (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError, ImportError)
"""Errors of a config or of weights that are not what their kind says."""


def load_drafter(
    name: str,
    kind: DrafterKind,
    folder: Path,
    config: dict[str, Any],
    target: LoadedModel,
    check: BatchingCheck,
) -> tuple[DraftModel, int]:
    """Drafter in a folder, and bytes of its weights. Raises SetupError."""
    title = f"model.draft: {name} is a {kind.value} drafter"
    if not mlx_vlm_models.is_installed():
        command = install_command(mlx_vlm_models.EXTRA)
        raise SetupError(f"{title}, whose class is part of mlx-vlm; install it: {command}")
    parts = None if isinstance(target.model, TextModel) else parts_of(target.model)
    if parts is None:
        raise SetupError(
            f"{title}, which needs the hidden states of {target.facts.id}, and passes of its type "
            "do not return them; remove model.draft"
        )
    try:
        if kind is DrafterKind.EAGLE3:
            return _eagle(name, folder, config, target, parts, check)
        return _blocks(name, kind, folder, config, target, parts)
    except BROKEN as error:
        raise SetupError(
            f"{title} that does not fit {target.facts.id}: {type(error).__name__}: {error}"
        ) from error


def _blocks(
    name: str,
    kind: DrafterKind,
    folder: Path,
    config: dict[str, Any],
    target: LoadedModel,
    parts: ModelParts,
) -> tuple[DraftModel, int]:
    own = config.get("dflash_config")
    if not isinstance(own, Mapping):
        raise ValueError("its config.json has no dflash_config")
    n_layers = len(target.model.layers)
    n_wanted = config.get("num_target_layers", n_layers)
    if n_wanted != n_layers:
        raise ValueError(f"it is for {n_wanted} layers, and the model has {n_layers}")
    drafter, args = _built(kind, {"block_size": own.get("block_size", 16), **config})
    _load(drafter, folder, config, drafter.sanitize)
    causal = config.get("is_causal", own.get("causal"))
    model = BlockModel(drafter, parts, causal)
    _check_layers(args.target_layer_ids, target)
    taps = LayerTaps(parts, target.model.layers, args.target_layer_ids)
    if args.hidden_size != taps.dim:
        raise ValueError(f"its hidden size is {args.hidden_size}, that of the model {taps.dim}")
    n_vocab = min(target.facts.n_vocab, int(args.vocab_size))
    if not 0 <= args.mask_token_id < n_vocab:
        raise ValueError(f"its mask is token {args.mask_token_id} of {n_vocab}")
    return BlockDrafter(name, model, taps, n_vocab), _n_bytes(drafter)


def _eagle(
    name: str,
    folder: Path,
    config: dict[str, Any],
    target: LoadedModel,
    parts: ModelParts,
    check: BatchingCheck,
) -> tuple[DraftModel, int]:
    drafter, args = _built(DrafterKind.EAGLE3, eagle_config(config, len(target.model.layers)))
    text = args.transformer_layer_config
    rope_config = getattr(text, "rope_parameters", None) or config.get("rope_scaling")
    for layer in drafter.layers:
        # mlx-vlm knows no scaling.
        layer.self_attn.rope = initialize_rope(
            int(text.head_dim), text.rope_theta, text.rope_traditional, rope_config,
            text.max_position_embeddings,
        )  # fmt: skip
    _load(drafter, folder, config, lambda weights: _eagle_weights(drafter, weights))
    _check_layers(args.capture_layer_ids, target)
    taps = LayerTaps(parts, target.model.layers, args.capture_layer_ids)
    if drafter.fc.weight.shape[-1] != taps.dim * len(args.capture_layer_ids):
        raise ValueError(
            f"it takes {drafter.fc.weight.shape[-1]} numbers of "
            f"{len(args.capture_layer_ids)} layers, and those of the model have {taps.dim} each"
        )
    head = EagleHead(drafter, taps, parts.embed)
    return MTPDrafter(head, check, target.facts.n_vocab, name), _n_bytes(drafter)


def _built(kind: DrafterKind, config: dict[str, Any]) -> tuple[Any, Any]:
    """Drafter of mlx-vlm without weights, and its parsed config."""
    mlx_vlm_models.join()
    module: Any = importlib.import_module(f"{DRAFTERS}.{MODULES[kind]}")
    args = module.ModelConfig.from_dict(config)
    return module.Model(args), args


def _load(
    drafter: Any,
    folder: Path,
    config: Mapping[str, Any],
    sanitize: Callable[[dict[str, mx.array]], dict[str, mx.array]],
) -> None:
    """Read the weights of the folder; quantized layers are those with scales."""
    raw: dict[str, mx.array] = {}
    for file in weight_files(folder, "model"):
        loaded: Any = mx.load(str(file))
        raw |= loaded
    weights = dict(sanitize(raw))
    table = config.get("quantization")
    if isinstance(table, Mapping):
        nn.quantize(
            drafter,
            table["group_size"],
            table["bits"],
            class_predicate=lambda name, _: f"{name}.scales" in weights,
        )
    drafter.load_weights(list(weights.items()))
    if not has_gpu():
        drafter.set_dtype(mx.float32)
    drafter.eval()
    mx.eval(drafter.parameters())


def _eagle_weights(drafter: Any, raw: dict[str, mx.array]) -> dict[str, mx.array]:
    """Tensors by mlx-vlm's names; without embeddings it takes the target's."""
    named = {
        name.replace(EAGLE_LAYER, "layers.0.", 1): array
        for name, array in raw.items()
        if not name.startswith(OF_TARGET)
    }
    weights: dict[str, mx.array] = drafter.sanitize(named)
    if "embed_tokens.weight" not in weights:
        del drafter.embed_tokens
    return weights


def _check_layers(layer_ids: Any, target: LoadedModel) -> None:
    """Raise ValueError for layers that the target does not have."""
    n_layers = len(target.model.layers)
    if not layer_ids or not all(0 <= i < n_layers for i in layer_ids):
        raise ValueError(f"it takes the outputs of layers {list(layer_ids)} of {n_layers}")


def _n_bytes(drafter: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(drafter.parameters()))
