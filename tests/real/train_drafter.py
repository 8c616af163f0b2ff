"""Trains a small DFlash2 drafter of a real model: `python -m tests.real.train_drafter MODEL OUT`.

Of the environment of `make models`. Half of the minutes make data: prompts from source files and
from requests to edit them, and greedy continuations of the model with the outputs of its layers.
The other half trains on them. Labels are the model's greedy tokens; a token of a block counts
while all before it are what the model says too. Then blocks are drafted for texts of files that
were held out, and the tokens are counted that the model accepts.

The folder has the form of published drafters. Published loss and data are larger; here one layer
and one million positions have to do.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn, optimizers
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_utils
from mlx_lm.models.cache import make_prompt_cache
from msgspec import Struct
from tokenizers import Tokenizer

from mlxstack.engine.model.mlx_vlm_models import join
from mlxstack.features.drafts.engine.layer_taps import LayerTaps
from mlxstack.features.drafts.engine.mtp_head import parts_of

N_PROMPT = 96
N_ANSWER = 160
N_ROWS = 24
"""Tokens of a prompt and of its continuation, and prompts that are continued together."""
N_ANCHORS = 48
"""Blocks of a sequence in a step of training."""
N_SEQUENCES = 4
N_NEGATIVES = 1024
"""Random tokens that a step compares with, beside those of its data and the most frequent."""
N_FREQUENT = 2048
N_HELD_OUT = 4
"""Prompts of each kind for the evaluation."""
HELD_OUT = 8
"""One file of so many is for the evaluation."""


class Continuation(Struct, frozen=True):
    """Tokens with the outputs of layers, and the model's greedy token after each."""

    tokens: np.ndarray
    features: np.ndarray
    """(n, layers * dim), half precision."""
    greedy: np.ndarray
    is_edit: bool = False


class Target:
    """Model with taps on some of its layers."""

    def __init__(self, folder: Path, layer_ids: Sequence[int]) -> None:
        self.model, self.config = mlx_utils.load_model(folder)
        parts = parts_of(self.model)
        assert parts is not None, "its output is not its head times its states"
        self.plain = parts
        self.taps = LayerTaps(parts, self.model.layers, layer_ids)

    def continued(self, prompts: np.ndarray, n_answer: int, is_edit: bool) -> list[Continuation]:
        """Greedy continuations of prompts (rows, n) of one length."""
        caches = make_prompt_cache(self.model)
        fed = mx.array(prompts)
        tokens = [prompts]
        features = []
        greedy = []
        for _ in range(n_answer):
            states = self.taps.parts.trunk(fed, caches)
            chosen = mx.argmax(self.taps.parts.head(states), axis=-1)
            features.append(np.array(self.taps.taken(states).astype(mx.float16)))
            greedy.append(np.array(chosen))
            fed = chosen[:, -1:]
            tokens.append(np.array(fed))
        rows = [np.concatenate(parts, axis=1) for parts in (tokens[:-1], features, greedy)]
        return [Continuation(*parts, is_edit) for parts in zip(*rows, strict=True)]


class Texts:
    """Prompts from source files."""

    def __init__(self, folders: Sequence[Path], tokenizer: Tokenizer, seed: int) -> None:
        files = sorted(file for folder in folders for file in folder.rglob("*.py"))
        random.Random(seed).shuffle(files)
        self._files = {
            True: files[::HELD_OUT],
            False: [f for i, f in enumerate(files) if i % HELD_OUT],
        }
        self._tokenizer = tokenizer

    def prompts(self, random_: random.Random, n: int, is_edit: bool, held_out: bool) -> np.ndarray:
        """`n` prompts of `N_PROMPT` tokens: code to go on with, or to write again."""
        rows = []
        while len(rows) < n:
            text = random_.choice(self._files[held_out]).read_text("utf-8", errors="ignore")
            lines = text.splitlines()
            if len(lines) < 30:
                continue
            start = random_.randrange(len(lines) - 20)
            piece = "\n".join(lines[start : start + 40])
            if is_edit:
                tokens = self._tokenizer.encode(piece).ids[: (N_PROMPT - 12) * 3 // 4]
                ask = self._tokenizer.encode("\n\n# The same code again:\n\n").ids
                again = tokens[: N_PROMPT - len(tokens) - len(ask)]
                tokens = [*tokens, *ask, *again]
            else:
                tokens = self._tokenizer.encode(piece).ids[:N_PROMPT]
            if len(tokens) == N_PROMPT:
                rows.append(tokens)
        return np.array(rows)


def config_of(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """config.json of the drafter, with the keys of a published one."""
    own = target.config
    n_heads = own["num_attention_heads"]
    return {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "hidden_act": "silu",
        "is_causal": False,
        "hidden_size": own["hidden_size"],
        "intermediate_size": own["intermediate_size"],
        "num_hidden_layers": args.layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": own["num_key_value_heads"],
        "head_dim": own.get("head_dim") or own["hidden_size"] // n_heads,
        "layer_types": ["full_attention"] * args.layers,
        "rms_norm_eps": own["rms_norm_eps"],
        "vocab_size": own["vocab_size"],
        "max_position_embeddings": own["max_position_embeddings"],
        "rope_parameters": {"rope_theta": own["rope_theta"], "rope_type": "default"},
        "num_target_layers": own["num_hidden_layers"],
        "dtype": "float32",
        "dflash_config": {
            "block_size": args.block,
            "mask_token_id": own.get("eos_token_id", 0),
            "target_layer_ids": args.taps,
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 48,
            "selector_top_k": 16,
        },
    }


def new_drafter(target: Target, config: dict[str, Any]) -> Any:
    """Drafter whose layers begin as the last ones of the model."""
    join()
    from mlx_vlm.speculative.drafters.dflash2 import DFlash2DraftModel, ModelConfig

    drafter = DFlash2DraftModel(ModelConfig.from_dict(json.loads(json.dumps(config))))
    dim = config["hidden_size"]
    n_layers = len(drafter.layers)
    for layer, like in zip(drafter.layers, target.model.layers[-n_layers:], strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            layer.self_attn[name].weight = like.self_attn[name].weight
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer.mlp[name].weight = like.mlp[name].weight
        layer.input_layernorm.weight = like.input_layernorm.weight
        layer.post_attention_layernorm.weight = like.post_attention_layernorm.weight
        for conv in (layer.attention_conv, layer.mlp_conv):
            conv.base_kernel = mx.zeros_like(conv.base_kernel)
            conv.base_kernel[:, 0] = 1.0
            conv.kernel_projection.weight = 0.1 * conv.kernel_projection.weight
    drafter.norm.weight = target.model.model.norm.weight
    fc = 0.01 * mx.random.normal((dim, drafter.fc.weight.shape[1]))
    fc[:, -dim:] += mx.eye(dim)
    drafter.fc.weight = fc
    selector = drafter.candidate_selector
    for table in (selector.predecessor_codebook, selector.successor_codebook):
        table.weight = 0.3 * mx.random.normal(table.weight.shape)
    mx.eval(drafter.parameters())
    return drafter


class Batch(Struct, frozen=True):
    """Blocks of some sequences."""

    features: mx.array
    """(sequences, n, layers * dim)"""
    anchors: mx.array
    """Positions (sequences, blocks)."""
    inputs: mx.array
    """Tokens (sequences, blocks): the last known ones."""
    labels: mx.array
    """Columns of `vocabulary` (sequences, blocks, block - 1)."""
    before: mx.array
    """Tokens before each label."""
    weights: mx.array
    vocabulary: mx.array


def batch_of(
    data: Sequence[Continuation],
    random_: np.random.Generator,
    n_block: int,
    frequent: np.ndarray,
    n_vocab: int,
    first: int = 8,
) -> Batch:
    """Random blocks of random sequences, none of which begins before position `first`."""
    chosen = [data[i] for i in random_.integers(0, len(data), N_SEQUENCES)]
    length = len(chosen[0].tokens)
    anchors = np.stack(
        [
            np.sort(random_.choice(np.arange(first, length - n_block), N_ANCHORS, replace=False))
            for _ in chosen
        ]
    )
    places = anchors[..., None] + np.arange(n_block)
    rows = np.arange(len(chosen))[:, None, None]
    tokens = np.stack([one.tokens for one in chosen])[rows, places]
    greedy = np.stack([one.greedy for one in chosen])[rows, places]
    labels = greedy[..., :-1]
    is_path = np.cumprod(labels[..., :-1] == tokens[..., 1:-1], axis=-1)
    weights = np.concatenate([np.ones_like(labels[..., :1]), is_path], axis=-1)
    vocabulary = np.unique(
        np.concatenate([frequent, labels.ravel(), random_.integers(0, n_vocab, N_NEGATIVES)])
    )
    return Batch(
        mx.array(np.stack([one.features for one in chosen]).astype(np.float32)),
        mx.array(anchors),
        mx.array(tokens[..., 0]),
        mx.array(np.searchsorted(vocabulary, labels)),
        mx.array(np.concatenate([tokens[..., :1], labels[..., :-1]], axis=-1)),
        mx.array(weights.astype(np.float32)),
        mx.array(vocabulary),
    )


def hidden_of(drafter: Any, embed: Any, batch: Batch) -> mx.array:
    """Last hidden states (sequences, blocks, block - 1, dim) of all blocks in one pass."""
    config = drafter.config
    n, blocks = batch.inputs.shape
    length = config.block_size
    masks = mx.full((n, blocks, length - 1), config.mask_token_id)
    tokens = mx.concatenate([batch.inputs[..., None], masks], axis=-1)
    x = embed(tokens).reshape(n * blocks, length, -1)
    context = drafter.hidden_norm(drafter.fc(batch.features))
    for layer in drafter.layers:
        residual = x
        x, kernel = layer.attention_conv.prepare(layer.input_layernorm(x))
        x = _attended(layer.self_attn, drafter.rope, x, context, batch.anchors)
        x = residual + layer.attention_conv.finish(x, kernel)
        residual = x
        x, kernel = layer.mlp_conv.prepare(layer.post_attention_layernorm(x))
        x = residual + layer.mlp_conv.finish(layer.mlp(x), kernel)
    return drafter.norm(x).reshape(n, blocks, length, -1)[:, :, 1:]


def _attended(
    attention: Any, rope: Any, x: mx.array, context: mx.array, anchors: mx.array
) -> mx.array:
    """Attention of blocks to the context before them, and to themselves."""
    n, blocks = anchors.shape
    length = x.shape[1]
    n_heads, kv_heads = attention.n_heads, attention.n_kv_heads
    offsets = anchors.reshape(-1)

    def split(projected: mx.array, n_parts: int, norm: Any = None) -> mx.array:
        parts = projected.reshape(*projected.shape[:2], n_parts, -1)
        return (parts if norm is None else norm(parts)).swapaxes(1, 2)

    queries = rope(split(attention.q_proj(x), n_heads, attention.q_norm), offset=offsets)
    keys = rope(split(attention.k_proj(x), kv_heads, attention.k_norm), offset=offsets)
    values = split(attention.v_proj(x), kv_heads)
    known = rope(split(attention.k_proj(context), kv_heads, attention.k_norm), offset=0)
    known_values = split(attention.v_proj(context), kv_heads)
    group = n_heads // kv_heads
    dim = queries.shape[-1]
    # (n, kv heads, blocks, group, length, dim)
    queries = queries.reshape(n, blocks, kv_heads, group, length, dim).transpose(0, 2, 1, 3, 4, 5)
    flat = queries.reshape(n, kv_heads, blocks * group * length, dim)
    scores = (flat @ known.swapaxes(-1, -2)) * attention.scale
    scores = scores.reshape(n, kv_heads, blocks, group * length, -1)
    is_before = mx.arange(context.shape[1]) < anchors[..., None]
    scores = mx.where(is_before[:, None, :, None], scores, -1e9)
    keys = keys.reshape(n, blocks, kv_heads, length, dim).swapaxes(1, 2)
    values = values.reshape(n, blocks, kv_heads, length, dim).swapaxes(1, 2)
    queries = queries.reshape(n, kv_heads, blocks, group * length, dim)
    own = (queries @ keys.swapaxes(-1, -2)) * attention.scale
    shares = mx.softmax(mx.concatenate([scores, own], axis=-1), axis=-1)
    n_known = context.shape[1]
    of_known = shares[..., :n_known].reshape(n, kv_heads, -1, n_known) @ known_values
    out = of_known.reshape(queries.shape) + shares[..., n_known:] @ values
    out = out.reshape(n, kv_heads, blocks, group, length, dim).transpose(0, 2, 4, 1, 3, 5)
    return attention.o_proj(out.reshape(n * blocks, length, -1))


def loss_of(drafter: Any, embed: Any, table: mx.array, batch: Batch) -> mx.array:
    """Cross entropy of the labels, by logits alone and with the selector's edges."""
    hidden = hidden_of(drafter, embed, batch)
    logits = hidden @ table[batch.vocabulary].T
    selector = drafter.candidate_selector
    pairs = selector.predecessor_codebook(batch.before) * selector.hidden_projection(hidden)
    edges = pairs @ selector.successor_codebook.weight[batch.vocabulary].T
    weights = batch.weights / batch.weights.sum()
    losses = nn.losses.cross_entropy(logits, batch.labels)
    losses = losses + nn.losses.cross_entropy(logits + edges, batch.labels)
    return (losses * weights).sum()


def accepted(drafter: Any, target: Target, data: Sequence[Continuation], every: int = 7) -> float:
    """Mean number of tokens of a block that the model accepts, as the class drafts them."""
    drafter.embed_tokens = target.plain.embed
    drafter.lm_head = target.plain.head
    counts = []
    n_block = drafter.config.block_size
    for one in data:
        features = mx.array(one.features[None].astype(np.float32))
        for start in range(N_PROMPT, len(one.tokens) - n_block, every):
            drafts = drafter.draft_block(
                int(one.tokens[start]),
                features[:, :start],
                drafter.make_cache(),
                n_block,
                lambda logits: mx.argmax(logits, axis=-1),
            )
            same = np.array(drafts)[0] == one.greedy[start : start + n_block - 1]
            counts.append(int(np.cumprod(same).sum()))
    drafter.embed_tokens = drafter.lm_head = None
    return float(np.mean(counts))


def check_pass(drafter: Any, target: Target, batch: Batch) -> None:
    """Refuse to train where all blocks at once are not what the class computes alone."""
    hidden = hidden_of(drafter, target.plain.embed, batch)[0, 3]
    drafter.embed_tokens = target.plain.embed
    config = drafter.config
    tokens = [batch.inputs[0, 3].item(), *[config.mask_token_id] * (config.block_size - 1)]
    start = int(batch.anchors[0, 3].item())
    alone = drafter._hidden(mx.array([tokens]), batch.features[:1, :start], drafter.make_cache())
    drafter.embed_tokens = None
    assert mx.allclose(hidden, alone[0, 1:], atol=1e-3, rtol=1e-3).item()


def save(drafter: Any, config: dict[str, Any], folder: Path, facts: dict[str, Any]) -> None:
    """Write the folder, with published names."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(drafter.parameters()))
    for name in ("predecessor_codebook", "successor_codebook"):
        key = f"candidate_selector.{name}"
        weights[key] = weights.pop(f"{key}.weight")
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "training.json").write_text(json.dumps(facts, indent=1))


class Clock:
    """Seconds of computing since the beginning, of all that there are."""

    def __init__(self, minutes: float) -> None:
        self._began = time.process_time()
        self.seconds = 60 * minutes

    @property
    def now(self) -> float:
        """Seconds that were used."""
        return time.process_time() - self._began

    def say(self, text: str) -> None:
        """Print a line after the seconds that were used."""
        print(f"{self.now:.0f} s: {text}", flush=True)


def held_out_of(target: Target, texts: Texts, random_: random.Random) -> list[Continuation]:
    """Continuations for the evaluation."""
    held_out = []
    for is_edit in (False, True):
        prompts = texts.prompts(random_, N_HELD_OUT, is_edit, held_out=True)
        held_out += target.continued(prompts, N_ANSWER, is_edit)
    return held_out


def made(target: Target, texts: Texts, random_: random.Random, clock: Clock) -> list[Continuation]:
    """Data of half of the time, of code and of edits in turns."""
    data: list[Continuation] = []
    is_edit = False
    while clock.now < 0.5 * clock.seconds:
        prompts = texts.prompts(random_, N_ROWS, is_edit, held_out=False)
        data += target.continued(prompts, N_ANSWER, is_edit)
        is_edit = not is_edit
        clock.say(f"{sum(len(one.tokens) for one in data)} tokens")
    return data


def trained(
    drafter: Any,
    target: Target,
    data: Sequence[Continuation],
    clock: Clock,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Train for what is left of the time; returns what was done."""
    counts = np.bincount(np.concatenate([one.greedy for one in data]))
    frequent = np.argsort(-counts)[: min(N_FREQUENT, int((counts > 0).sum()))]
    generator = np.random.default_rng(args.seed)
    n_vocab = target.config["vocab_size"]
    check_pass(drafter, target, batch_of(data, generator, args.block, frequent, n_vocab))
    table = target.model.model.embed_tokens.weight
    embed = target.plain.embed
    step = nn.value_and_grad(drafter, lambda model, batch: loss_of(model, embed, table, batch))
    optimizer = optimizers.AdamW(args.rate, weight_decay=0.01)
    n_steps = 0
    average = 0.0
    while (left := clock.seconds - clock.now) > 0.02 * clock.seconds:
        batch = batch_of(data, generator, args.block, frequent, n_vocab)
        warm = min(1.0, (n_steps + 1) / 20)
        optimizer.learning_rate = args.rate * warm * (0.05 + 0.95 * left / (0.5 * clock.seconds))
        loss, gradients = step(drafter, batch)
        gradients, _ = optimizers.clip_grad_norm(gradients, 1.0)
        optimizer.update(drafter, gradients)
        mx.eval(drafter.parameters(), optimizer.state, loss)
        n_steps += 1
        average += (float(loss.item()) - average) / min(n_steps, 30)
        if n_steps % 20 == 0:
            clock.say(f"step {n_steps}, loss {average:.3f}")
    return {
        "minutes": args.minutes,
        "seed": args.seed,
        "tokens": sum(len(one.tokens) for one in data),
        "steps": n_steps,
        "blocks": n_steps * N_SEQUENCES * N_ANCHORS,
        "loss": average,
        "block": args.block,
    }


def main() -> None:
    """Make data, train, and print what is accepted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--texts", type=Path, nargs="+", default=[Path(np.__file__).parents[1]])
    parser.add_argument("--minutes", type=float, default=45, help="of processor time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--block", type=int, default=5)
    parser.add_argument("--taps", type=int, nargs="+", default=[9, 19, 28])
    parser.add_argument("--rate", type=float, default=4e-4)
    args = parser.parse_args()
    clock = Clock(args.minutes)
    mx.random.seed(args.seed)
    random_ = random.Random(args.seed)
    target = Target(args.model, args.taps)
    texts = Texts(args.texts, Tokenizer.from_file(str(args.model / "tokenizer.json")), args.seed)
    held_out = held_out_of(target, texts, random_)
    data = made(target, texts, random_, clock)
    config = config_of(target, args)
    drafter = new_drafter(target, config)
    facts = trained(drafter, target, data, clock, args)
    for name, is_edit in (("code", False), ("edits", True)):
        rows = [one for one in held_out if one.is_edit == is_edit]
        facts[f"accepted of a block, {name}"] = accepted(drafter, target, rows)
    save(drafter, config, args.out, facts)
    clock.say(json.dumps(facts))


if __name__ == "__main__":
    main()
