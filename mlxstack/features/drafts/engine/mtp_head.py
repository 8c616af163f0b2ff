"""Multi-token prediction (MTP) heads of checkpoints, which mlx-lm drops when it loads.

A head of one decoder layer predicts the token after the next one, from the last hidden state of a
token and the embedding of the next: layer(W [norm(embedding); norm(state)]). Sources: DeepSeek-V3
Technical Report, section 2.2 (arXiv 2412.19437), and the tensor names of published checkpoints.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm import utils as mlx_utils
from mlx_lm.models.base import create_attention_mask

from mlxstack.engine.device import has_gpu
from mlxstack.engine.model.runner import ModelParts
from mlxstack.models.model_files import weight_files
from mlxstack.models.mtp_layouts import QWEN, HeadLayout, HeadTensors, head_tensors
from mlxstack.models.rope_config import with_flat_rope

Weights = dict[str, mx.array]


class MTPHead(nn.Module):  # type: ignore[misc]
    """Head over the embedding and the output head of its model.

    Its input are features (B, T, 2 * dim): the embedding of a token, and the state before it.
    """

    def __init__(
        self, target: ModelParts, layer: Any, sizes: tuple[int, float], layout: HeadLayout
    ):
        super().__init__()
        dim, eps = sizes
        self.layers = [layer]
        self.embedding_norm = nn.RMSNorm(dim, eps)
        self.hidden_norm = nn.RMSNorm(dim, eps)
        self.projection = nn.Linear(2 * dim, dim, bias=False)
        self.norm = nn.RMSNorm(dim, eps)
        self.target = target
        self._layout = layout

    def __call__(self, features: mx.array, cache: Sequence[Any]) -> mx.array:
        return self.logits(self.states(features, cache))

    def inputs(self, states: mx.array) -> mx.array:
        """States (n, dim) to draft from, of the target's."""
        return states

    def chosen(self, logits: mx.array, n_vocab: int) -> mx.array:
        """The likeliest tokens (n,) below `n_vocab`."""
        return mx.argmax(logits[..., :n_vocab], axis=-1)

    def features(self, tokens: mx.array, states: mx.array) -> mx.array:
        """Features of tokens (n,), after last hidden states (n, dim)."""
        return mx.concatenate([self.target.embed(tokens).astype(states.dtype), states], axis=-1)

    def states(self, features: mx.array, caches: Sequence[Any]) -> mx.array:
        """States (B, T, dim) to draft from, and to go on from."""
        embeddings, states = mx.split(features, 2, axis=-1)
        normed = [self.embedding_norm(embeddings), self.hidden_norm(states)]
        x = self.projection(mx.concatenate(normed, axis=-1))
        mask = create_attention_mask(x, caches[0], return_array=self._layout.is_mask_array)
        out: mx.array = self.layers[0](x, mask, caches[0])
        return self.norm(out) if self._layout.is_normed else out

    def logits(self, states: mx.array) -> mx.array:
        """Logits (..., vocabulary) of the states."""
        return self.target.head(states if self._layout.is_normed else self.norm(states))

    @property
    def parts(self) -> ModelParts:
        """The head as a model of its own, whose tokens are features."""
        return ModelParts(self.states, self.logits, self.target.embed, self.example)

    def example(self, n: int) -> mx.array:
        """Features of `n` pairs, to measure passes with."""
        return mx.zeros((n, 2 * self.norm.weight.shape[0]), self.norm.weight.dtype)


def parts_of(model: Any) -> ModelParts | None:
    """Parts of a model, None where they are not all of it.

    Scaled logits and softcaps of a model file would be missing: a short pass is compared.
    """
    text = getattr(model, "language_model", model)
    trunk = getattr(text, "model", None)
    if trunk is None or "embed_tokens" not in trunk:
        return None
    embedding = trunk.embed_tokens
    parts = ModelParts(trunk, text.lm_head if "lm_head" in text else embedding.as_linear, embedding)
    tokens = mx.arange(4)[None]
    whole = model(tokens)
    ours = parts.head(parts.trunk(tokens))
    if mx.allclose(whole, ours, rtol=1e-3, atol=1e-3).item():
        return parts
    return None


def load_head(model: Any, path: Path, quantization: Any = None) -> MTPHead | None:
    """MTP head in a folder for a model, None without one.

    A head in full precision gets the model's `quantization`, as config.json has it. Raises
    ValueError for one that cannot be read, or does not fit the model.
    """
    config = with_flat_rope(mlx_utils.load_config(path))
    names = head_tensors(config)
    if names is None:
        return None
    try:
        tensors = _Tensors(path, names)
        if f"{names.layout.projection}.weight" not in tensors.of_head:
            return None
        parts = parts_of(model)
        if parts is None:
            raise ValueError("the output of the model is not its states times its output head")
        head = _build(model, config, tensors, parts)
        if quantization and not tensors.is_quantized:
            size = quantization["group_size"]
            bits = quantization["bits"]
            nn.quantize(head, size, bits, class_predicate=_is_divisible_by(size))
        if not has_gpu():
            head.set_dtype(mx.float32)
        head.eval()
        mx.eval(head.parameters())
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return head


class _Tensors:
    """Lazily loaded tensors of a head, by their names below its prefix."""

    def __init__(self, path: Path, names: HeadTensors) -> None:
        self.of_head: Weights = {}
        self.layout = names.layout
        is_converted = None
        for name, tensor, is_mlx in _weights(path):
            if name.endswith("conv1d.weight"):
                is_converted = tensor.shape[-1] == 1
            if names.is_of_head(name):
                self.of_head[name.rpartition(names.prefix)[2]] = tensor
                is_converted = is_mlx if is_converted is None else is_converted
        self.is_published = not is_converted
        """Whether the tensors are as published, not converted by mlx-lm."""
        self.is_quantized = any(name.endswith(".scales") for name in self.of_head)


OWN_FILES = ("model", "mtp")
"""Beginnings of the files that hold heads; others may be no weights at all."""


def _weights(path: Path) -> Iterator[tuple[str, mx.array, bool]]:
    """Names and tensors of the weight files, and whether mlx-lm wrote each."""
    for file in weight_files(path):
        try:
            loaded: Any = mx.load(str(file), return_metadata=True)
        except (ValueError, RuntimeError):
            if file.name.startswith(OWN_FILES):
                raise
            # Such as a second copy of the weights that was never downloaded.
            continue
        tensors, metadata = loaded
        for name, tensor in tensors.items():
            yield name, tensor, metadata.get("format") == "mlx"


def _is_divisible_by(size: int) -> Callable[[str, Any], bool]:
    """Modules whose rows can be quantized in groups of `size`."""
    return lambda _, module: hasattr(module, "to_quantized") and module.weight.shape[-1] % size == 0


def _build(model: Any, config: dict[str, Any], tensors: _Tensors, parts: ModelParts) -> MTPHead:
    """Head with its weights.

    Its layer is of the class and kind of the model's last attention layer. The layer's tensors
    take the names of that one, so that the model's own conversion of published tensors (stacked
    experts, FP8, latent attention) applies.
    """
    layout = tensors.layout
    model_class, args_class = mlx_utils._get_classes(config)
    # Lazy: no weight of it is ever computed.
    layers = model_class(args_class.from_dict(config)).layers
    index = max(i for i, layer in enumerate(layers) if "self_attn" in layer)
    inner = Weights()
    weights = Weights()
    modules = ("embedding_norm", "hidden_norm", "projection", "norm")
    names = {getattr(layout, module): module for module in modules}
    for name, tensor in tensors.of_head.items():
        module, _, kind = name.rpartition(".")
        if module in names:
            weights[f"{names[module]}.{kind}"] = tensor
        elif name.startswith(layout.layer):
            inner[f"model.layers.{index}.{name.removeprefix(layout.layer)}"] = tensor
        else:
            raise ValueError(f"its tensor {name} is not known")
    if tensors.is_published and layout is QWEN:
        # By this shape Qwen's conversions know that norms are stored less one.
        inner["model.layers.0.linear_attn.conv1d.weight"] = mx.zeros((1, 1, 4))
        weights = {name: w + 1 if w.ndim == 1 else w for name, w in weights.items()}
    converted = model.sanitize(inner) if hasattr(model, "sanitize") else inner
    for name, tensor in converted.items():
        _, is_of_layer, inside = name.partition(f"layers.{index}.")
        if is_of_layer:
            weights["layers.0." + inside] = tensor
    dim = tensors.of_head[f"{layout.embedding_norm}.weight"].shape[0]
    eps = float((config.get("text_config") or config).get("rms_norm_eps", 1e-6))
    head = MTPHead(parts, layers[index], (dim, eps), layout)
    nn.quantize(head, class_predicate=lambda name, module: _quantization(name, module, weights))
    head.load_weights(list(weights.items()))
    return head


def _quantization(name: str, module: Any, weights: Weights) -> bool | dict[str, Any]:
    """Quantization of a module in the checkpoint, by tensor shapes."""
    if f"{name}.scales" not in weights or not hasattr(module, "to_quantized"):
        return False
    dims = module.weight.shape[-1]
    group_size = dims // weights[f"{name}.scales"].shape[-1]
    return {"group_size": group_size, "bits": weights[f"{name}.weight"].shape[-1] * 32 // dims}
