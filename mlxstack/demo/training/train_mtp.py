"""Train an MTP head for the demo model.

The weights of the model stay as they are. The head is a decoder layer like the model's, in the
layout that `features.drafts.engine.mtp_head` reads: from the last hidden state of a token and the
next token it predicts the token after that one. It learns to go on from its own states too, as
drafting does.
"""

import argparse
import random
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from mlxstack.demo import MODEL_DIR
from mlxstack.demo.training.curriculum import CurriculumStage, batches_of, make_tokenizer, padded
from mlxstack.demo.training.train import (
    CONFIG,
    MUON_GAIN,
    REPORT_STEPS,
    Params,
    decoder_layer,
    hidden,
    quick_softmax,
    two_optimizers,
)

FILE = "mtp.safetensors"
NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
DEPTH = 3
"""Tokens in a row that the head learns to draft."""
NO_LEAP = (1, 0)
DIM = CONFIG["hidden_size"]
EPS = CONFIG["rms_norm_eps"]
LATE = 0.3
"""Share of the steps in which the head sees the end of a conversation only, as after a hit."""


def new_head(layer: Params) -> Params:
    """Head like the model's last layer, fed with states alone."""
    half = mx.concatenate([mx.zeros((DIM, DIM)), mx.eye(DIM)], axis=-1)
    norms = {name: {"weight": mx.ones(DIM)} for name in NORMS}
    copied = tree_map(mx.array, layer)
    return {
        "layers": [copied],
        "fc": {"weight": half + 0.02 * mx.random.normal(half.shape)},
        **norms,
    }


def step_states(head: Params, embeddings: mx.array, states: mx.array) -> mx.array:
    """States of the head from embeddings and states (B, T, dim)."""
    inputs = [
        mx.fast.rms_norm(embeddings, head["pre_fc_norm_embedding"]["weight"], EPS),
        mx.fast.rms_norm(states, head["pre_fc_norm_hidden"]["weight"], EPS),
    ]
    x = mx.concatenate(inputs, axis=-1) @ head["fc"]["weight"].T
    return mx.fast.rms_norm(
        decoder_layer(head["layers"][0], x, NO_LEAP), head["norm"]["weight"], EPS
    )


def loss_of(
    head: Params, embedding: mx.array, states: mx.array, tokens: mx.array, token_weights: mx.array
) -> mx.array:
    """Mean cross entropy of the tokens at depth 1, 2, ..., DEPTH.

    `states` (B, T - 1, dim) are the model's, of all `tokens` (B, T) but the last; `token_weights`
    (B, T) weighs the tokens to predict.
    """
    total = mx.array(0.0)
    for depth in range(1, DEPTH + 1):
        states = step_states(head, embedding[tokens[:, depth:-1]], states[:, :-1])
        weights = token_weights[:, depth + 1 :]
        targets = tokens[:, depth + 1 :]
        chances = quick_softmax(states @ embedding.T)
        picked = mx.take_along_axis(chances, targets[..., None], -1)[..., 0]
        total -= (mx.log(picked + 1e-8) * weights).sum() / mx.maximum(weights.sum(), 1)
    return total / DEPTH


def train(model: Path, out: Path, n_steps: int, seed: int) -> None:
    """Train on dialogues, and write the head after every report."""
    mx.random.seed(seed)
    rng = random.Random(seed)
    arrays: Any = mx.load(str(model / "model.safetensors"))
    frozen: Any = tree_unflatten([(k, v.astype(mx.float32)) for k, v in arrays.items()])
    embedding = frozen["model"]["embed_tokens"]["weight"]
    head = new_head(frozen["model"]["layers"][-1])
    optimizer = two_optimizers()
    optimizer.init(head)
    grade = mx.value_and_grad(loss_of)
    stage = CurriculumStage("head", n_steps, 1e-3, 1e-5, n_far=6, far_words=600, most_gap=2500)
    batches = batches_of(rng, stage, make_tokenizer(model, seed))
    losses = list[float]()
    since = time.monotonic()
    for step in range(n_steps):
        rows, places = padded(next(batches))
        tokens = mx.array(rows)
        token_weights = [0.0] * tokens.size
        for place in places:
            row, column = divmod(place, tokens.shape[1] - 1)
            token_weights[row * tokens.shape[1] + column + 1] = 1.0
        weights = mx.array(token_weights).reshape(tokens.shape)
        gap = rng.randint(0, stage.most_gap) if rng.random() < 0.5 else 0
        states = hidden(frozen, tokens[:, :-1], (rng.randint(1, tokens.shape[1] - 2), gap))
        start = rng.randint(0, tokens.shape[1] - 16) if rng.random() < LATE else 0
        tokens = tokens[:, start:]
        states = states[:, start:]
        weights = weights[:, start:]
        for part, gain in zip(optimizer.optimizers, (MUON_GAIN, 1.0), strict=True):
            part.learning_rate = mx.array(stage.rate(step) * gain)
        loss, grads = grade(head, embedding, states, tokens, weights)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        head = optimizer.apply_gradients(grads, head)
        mx.eval(head, optimizer.state, loss)
        value: Any = loss.item()
        losses.append(float(value))
        if (step + 1) % REPORT_STEPS == 0 or step + 1 == n_steps:
            pace = (time.monotonic() - since) / len(losses)
            mean = sum(losses) / len(losses)
            print(f"{step + 1}/{n_steps} loss {mean:.4f} {pace:.2f} s/step", flush=True)
            write(head, out)
            losses = []
            since = time.monotonic()


def write(head: Params, out: Path) -> None:
    weights = {f"mtp.{k}": v.astype(mx.float16) for k, v in tree_flatten(head)}
    mx.save_safetensors(str(out / FILE), weights, {"format": "mlx"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="folder of the model")
    parser.add_argument("--out", type=Path, required=True, help="folder for the head")
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    options.out.mkdir(parents=True, exist_ok=True)
    train(options.model, options.out, options.steps, options.seed)


if __name__ == "__main__":
    main()
