"""Vectors of texts from hidden states, by a model's recipe."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from mlxstack.core.errors import SetupError
from mlxstack.models.embedding_recipe import Activation, DenseLayer, EmbeddingRecipe, PoolingMode

ACTIVATIONS: dict[Activation, Callable[[mx.array], mx.array]] = {
    Activation.IDENTITY: lambda x: x,
    Activation.TANH: mx.tanh,
    Activation.RELU: nn.relu,
    Activation.GELU: nn.gelu,
    Activation.SILU: nn.silu,
    Activation.SIGMOID: mx.sigmoid,
}
MIN_LENGTH = 1e-12
"""Shortest vector that is divided by its length."""


class Pooler:
    """Pools hidden states and computes the modules after them, in float32.

    Raises SetupError for dense layers that do not fit states of `width` numbers.
    """

    def __init__(self, recipe: EmbeddingRecipe, width: int) -> None:
        self._modes = recipe.modes
        self._modules: list[Callable[[mx.array], mx.array]] = []
        width *= len(recipe.modes)
        for module in recipe.modules:
            if isinstance(module, DenseLayer):
                dense = Dense(module, width)
                width = dense.width
                self._modules.append(dense)
            else:
                self._modules.append(normalized)

    def vectors(self, states: mx.array, lengths: Sequence[int]) -> mx.array:
        """Vectors (texts, dims) of length one, of states (texts, tokens, width).

        Tokens beyond the length of their text are padding.
        """
        states = states.astype(mx.float32)
        pooled = [pool(mode, states, lengths) for mode in self._modes]
        vectors = mx.concatenate(pooled, axis=-1)
        for module in self._modules:
            vectors = module(vectors)
        return normalized(vectors)


class Dense:
    """Dense layer of sentence-transformers; `width` numbers come out."""

    def __init__(self, layer: DenseLayer, width: int) -> None:
        tensors: Any = mx.load(str(layer.file))
        weight = tensors.get("linear.weight")
        self._bias = tensors.get("linear.bias")
        if weight is None or weight.ndim != 2 or weight.shape[1] != width:
            shape = None if weight is None else tuple(weight.shape)
            raise SetupError(
                f"{layer.file} has linear.weight of the shape {shape}, which does not fit vectors "
                f"of {width} numbers"
            )
        self._weight = weight.astype(mx.float32)
        self._activation = ACTIVATIONS[layer.activation]
        self.width = int(weight.shape[0])

    def __call__(self, vectors: mx.array) -> mx.array:
        """Vectors (texts, width) of vectors (texts, in)."""
        vectors = vectors @ self._weight.T
        if self._bias is not None:
            vectors = vectors + self._bias.astype(mx.float32)
        return self._activation(vectors)


def normalized(vectors: mx.array) -> mx.array:
    """Vectors of length one."""
    lengths = mx.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / mx.maximum(lengths, MIN_LENGTH)


def pool(mode: PoolingMode, states: mx.array, lengths: Sequence[int]) -> mx.array:
    """One vector per text, of states (texts, tokens, width)."""
    n_tokens = mx.array(list(lengths))[:, None]
    if mode is PoolingMode.CLS:
        return states[:, 0]
    if mode is PoolingMode.LAST:
        return states[mx.arange(len(lengths)), n_tokens[:, 0] - 1]
    place = mx.arange(states.shape[1])[None]
    is_token = place < n_tokens
    if mode is PoolingMode.MAX:
        return mx.where(is_token[..., None], states, -mx.inf).max(axis=1)
    weights = mx.where(is_token, place + 1 if mode is PoolingMode.WEIGHTED_MEAN else 1, 0)
    weights = weights.astype(mx.float32)[..., None]
    total = weights.sum(axis=1)
    if mode is PoolingMode.MEAN_SQRT_LEN:
        total = mx.sqrt(total)
    # A product with zero would keep the NaN of a padded state.
    return mx.where(weights > 0, states * weights, 0).sum(axis=1) / total
