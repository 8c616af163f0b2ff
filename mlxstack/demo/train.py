"""Train the demo model from nothing: tokenizer, copying, then dialogues."""

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.llama import Model, ModelArgs

from mlxstack.demo.copying import Sample, copy_sample

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 160,
    "num_hidden_layers": 4,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}
CHUNK = 128
SQUARINGS = 8
Params = dict[str, Any]


@mx.custom_function
def quick_softmax(scores: mx.array) -> mx.array:
    """Softmax over the last axis. exp is (1 + x/256)^256: the CPU's exp is 30 times slower."""
    shifted = scores - scores.max(-1, keepdims=True)
    powers = mx.maximum(1 + shifted / 2**SQUARINGS, 0)
    for _ in range(SQUARINGS):
        powers = powers * powers
    return powers / powers.sum(-1, keepdims=True)


@quick_softmax.vjp
def quick_softmax_vjp(_: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    weighted = cotangent * output
    return weighted - output * weighted.sum(-1, keepdims=True)


@mx.custom_function
def quick_sigmoid(x: mx.array) -> mx.array:
    powers = 1 - mx.clip(x, -30, 30) / 2**SQUARINGS
    for _ in range(SQUARINGS):
        powers = powers * powers
    return 1 / (1 + powers)


@quick_sigmoid.vjp
def quick_sigmoid_vjp(_: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    return cotangent * output * (1 - output)


def attend(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """Causal attention in chunks of queries, so that scores stay in the CPU's cache."""
    length = queries.shape[-2]
    outputs = []
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        visible = mx.arange(stop) <= mx.arange(start, stop)[:, None]
        scores = queries[..., start:stop, :] @ keys[..., :stop, :].swapaxes(-1, -2)
        scores = scores + mx.where(visible, 0.0, -1e9)
        outputs.append(quick_softmax(scores) @ values[..., :stop, :])
    return mx.concatenate(outputs, axis=-2)


def attention(layer: Params, x: mx.array) -> mx.array:
    rows, length, _ = x.shape
    n_heads, n_kv, width = (
        CONFIG["num_attention_heads"],
        CONFIG["num_key_value_heads"],
        CONFIG["head_dim"],
    )
    rope = partial(
        mx.fast.rope, dims=width, traditional=False, base=CONFIG["rope_theta"], scale=1.0, offset=0
    )

    def heads(name: str, count: int) -> mx.array:
        out: mx.array = x @ layer[name]["weight"].T
        return out.reshape(rows, length, count, width).transpose(0, 2, 1, 3)

    queries = rope(heads("q_proj", n_heads) * width**-0.5)
    queries = queries.reshape(rows, n_kv, n_heads // n_kv, length, width)
    keys, values = rope(heads("k_proj", n_kv)), heads("v_proj", n_kv)
    mixed = attend(queries, keys[:, :, None], values[:, :, None])
    mixed = mixed.reshape(rows, n_heads, length, width).transpose(0, 2, 1, 3)
    out: mx.array = mixed.reshape(rows, length, -1) @ layer["o_proj"]["weight"].T
    return out


def hidden(params: Params, tokens: mx.array) -> mx.array:
    """The Llama forward pass of mlx-lm, on the same weights, quick to train on a CPU."""
    model, eps = params["model"], CONFIG["rms_norm_eps"]
    x: mx.array = model["embed_tokens"]["weight"][tokens]
    for layer in model["layers"]:
        normed = mx.fast.rms_norm(x, layer["input_layernorm"]["weight"], eps)
        x = x + attention(layer["self_attn"], normed)
        normed = mx.fast.rms_norm(x, layer["post_attention_layernorm"]["weight"], eps)
        mlp = layer["mlp"]
        gate = normed @ mlp["gate_proj"]["weight"].T
        inner = gate * quick_sigmoid(gate) * (normed @ mlp["up_proj"]["weight"].T)
        x = x + inner @ mlp["down_proj"]["weight"].T
    return mx.fast.rms_norm(x, model["norm"]["weight"], eps)


def loss_of(params: Params, tokens: mx.array, places: mx.array) -> mx.array:
    """Mean cross entropy at `places`, flat indices into the targets."""
    states = hidden(params, tokens[:, :-1])
    states = states.reshape(-1, states.shape[-1])[places]
    targets = tokens[:, 1:].reshape(-1)[places]
    chances = quick_softmax(states @ params["model"]["embed_tokens"]["weight"].T)
    picked = mx.take_along_axis(chances, targets[:, None], -1)
    return -mx.log(picked + 1e-8).mean()


def collate(samples: list[Sample]) -> tuple[mx.array, mx.array]:
    """Pad to one length; the places are where the next token is to be learned."""
    length = max(len(tokens) for tokens, _ in samples)
    rows = [tokens + [0] * (length - len(tokens)) for tokens, _ in samples]
    places = [
        row * (length - 1) + at - 1
        for row, (_, marks) in enumerate(samples)
        for at, mark in enumerate(marks)
        if mark and at > 0
    ]
    return mx.array(rows), mx.array(places)


@dataclass(frozen=True)
class Stage:
    """A stretch of training: `batch` draws the samples of one step."""

    name: str
    steps: int
    rate: float
    batch: Callable[[random.Random], list[Sample]]
