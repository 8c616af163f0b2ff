"""Train a vision tower for the demo model.

The weights of the text model stay as they are. The tower is a small one of Pixtral's kind with the
projector of Mistral 3, in the layout that `features.vision.towers.pixtral` reads. It learns
through the text model: its features stand in place of embeddings, and the answer names color and
letter.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import msgspec
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from msgspec import Struct
from tokenizers import Tokenizer

from mlxstack.core.image import ImageSize
from mlxstack.demo import MODEL_DIR
from mlxstack.demo.training import smalltalk
from mlxstack.demo.training.copy_task import Sample
from mlxstack.demo.training.curriculum import CurriculumStage, padded
from mlxstack.demo.training.dataset import opening
from mlxstack.demo.training.example import Case, Draw, Message, says, user
from mlxstack.demo.training.pictures import Picture, choice, picture
from mlxstack.demo.training.tokenize import to_sample
from mlxstack.demo.training.train import (
    CONFIG,
    MUON_GAIN,
    REPORT_STEPS,
    Params,
    quick_sigmoid,
    quick_softmax,
    states_of,
    two_optimizers,
)
from mlxstack.features.vision.images.pixtral import PLACEHOLDER, PixtralProcessor, PixtralSettings

FILE = "vision.safetensors"
PREPROCESSOR = {
    "size": {"longest_edge": 48},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
VISION: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "head_dim": 24,
    "num_hidden_layers": 3,
    "patch_size": 8,
    "rope_theta": 10000.0,
}
MERGE = 2
BATCH = 24
EPS = 1e-5
LETTER_WEIGHT = 3
"""How often a letter counts more than another token."""
STOP = 22
"""Token of the full stop, which follows the letter."""
MAX_TOKENS = 160
"""Tokens of a dialogue."""
QUESTIONS = (
    "What is in this picture?",
    "What do you see?",
    "What is in the picture?",
    "Describe the picture.",
    "What does the picture show?",
    "What is this?",
    "Which letter is this?",
    "Describe this image.",
    "What is in this image?",
    "What can you see in this picture?",
    "What is shown here?",
    "Name color and letter.",
)
SHAPES = (*((1, 1),) * 6, (3, 2), (2, 3))
"""Width to height; pictures of a batch have one."""


def processor() -> PixtralProcessor:
    settings = msgspec.convert(PREPROCESSOR, PixtralSettings)
    return PixtralProcessor(VISION["patch_size"], MERGE, settings, 1 << 20, "")


STAGES = (
    CurriculumStage("look", 800, 1e-3, 1e-4),
    CurriculumStage("place", 220, 1e-3, 1e-4),
    CurriculumStage("tell", 200, 1e-3, 3e-4),
    CurriculumStage("talk", 90, 5e-4, 1e-5),
)
"""Color and letter by the tower alone, then as embeddings of the answer's tokens, then in a
sentence of the text model, then in dialogues. Each begins with the file of the one before."""


class PictureBatch(Struct, frozen=True):
    """Dialogues with pictures of one size.

    Tokens (B, T), places to learn, pixels (N, patches, values), and places of features."""

    tokens: mx.array
    places: mx.array
    pixels: mx.array
    at: mx.array
    size: ImageSize


def asked(draw: Draw, image: Picture) -> list[Message]:
    """A picture with a question, and the answer."""
    question = draw.rng.choice(QUESTIONS)
    text = f"{question}[IMG]" if draw.rng.random() < 0.25 else f"[IMG]{question}"
    return [user(text), says(image.answer, "I look at the picture.")]


def case_of(draw: Draw, shape: tuple[int, int], is_talk: bool = True) -> tuple[Case, list[Picture]]:
    """A dialogue about one picture, or about two, and its pictures."""
    rng = draw.rng
    if not is_talk:
        image = picture(rng, *choice(rng), shape)
        return Case(asked(draw, image)), [image]
    images = [picture(rng, *choice(rng), shape) for _ in range(2 if rng.random() < 0.15 else 1)]
    messages = opening(draw)[:1] if rng.random() < 0.3 else []
    if rng.random() < 0.1:
        messages += smalltalk.unrelated(draw)
    for image in images:
        messages += asked(draw, image)
    if (chance := rng.random()) < 0.25:
        again = rng.choice(QUESTIONS)
        messages += [user(again), says(images[-1].answer, "I look at the picture.")]
    elif chance < 0.4:
        messages += smalltalk.unrelated(draw)
    return Case(messages), images


def batch_of(
    rng: random.Random, tokenizer: Tokenizer, look: PixtralProcessor, is_talk: bool
) -> PictureBatch:
    shape = rng.choice(SHAPES)
    draw = Draw(rng)
    samples = list[Sample]()
    pixels = list[Any]()
    size = look.size(1000 * shape[0], 1000 * shape[1])
    ids = tokenizer.get_vocab()
    expanded = [ids[text or PLACEHOLDER] for text in look.expand(size)]
    while len(samples) < BATCH:
        case, images = case_of(draw, shape, is_talk)
        tokens, marks = to_sample(case, tokenizer)
        if len(tokens) > MAX_TOKENS:
            continue
        wider = [
            (new, mark)
            for token, mark in zip(tokens, marks, strict=True)
            for new in (expanded if token == ids[PLACEHOLDER] else [token])
        ]
        samples.append(([token for token, _ in wider], [mark for _, mark in wider]))
        pixels += [look.pixels(drawn.image, size) for drawn in images]
    rows, places = weighted(samples)
    width = len(rows[0])
    positions = [
        row * (width - 1) + column
        for row, tokens in enumerate(rows)
        for column, token in enumerate(tokens)
        if token == ids[PLACEHOLDER]
    ]
    return PictureBatch(
        mx.array(rows), mx.array(places), mx.array(np.stack(pixels)), mx.array(positions), size
    )


def new_tower() -> Params:
    """Random weights of a tower with its projector."""
    dim = VISION["hidden_size"]
    wide = VISION["intermediate_size"]
    n = CONFIG["hidden_size"]

    def matrix(rows: int, columns: int) -> Params:
        return {"weight": mx.random.uniform(-1, 1, (rows, columns)) * columns**-0.5}

    def norm() -> Params:
        return {"weight": mx.ones(dim)}

    def layer() -> Params:
        mlp = {name: matrix(wide, dim) for name in ("gate_proj", "up_proj")}
        return {
            "attention_norm": norm(),
            "attention": {f"{name}_proj": matrix(dim, dim) for name in "qkvo"},
            "ffn_norm": norm(),
            "feed_forward": mlp | {"down_proj": matrix(dim, wide)},
        }

    return {
        "patch_conv": matrix(dim, 3 * VISION["patch_size"] ** 2),
        "ln_pre": norm(),
        "transformer": {"layers": [layer() for _ in range(VISION["num_hidden_layers"])]},
        "multi_modal_projector": {
            "norm": norm(),
            "patch_merger": {"merging_layer": matrix(dim, dim * MERGE**2)},
            "linear_1": matrix(n, dim),
            "linear_2": matrix(n, n),
        },
    }


def angles(size: ImageSize) -> tuple[mx.array, mx.array]:
    """Cosines and sines (patches, head_dim) of the rotation in two dimensions."""
    head = VISION["head_dim"]
    base = VISION["rope_theta"]
    steps = base ** -(np.arange(0, head, 2) / head)
    rows, columns = np.indices((size.rows * MERGE, size.columns * MERGE)).reshape(2, -1)
    both = [np.outer(rows, steps[::2]), np.outer(columns, steps[1::2])]
    turns = mx.array(np.concatenate(both * 2, axis=1).astype(np.float32))
    return mx.cos(turns), mx.sin(turns)


def turned(x: mx.array, rope: tuple[mx.array, mx.array]) -> mx.array:
    half = x.shape[-1] // 2
    return x * rope[0] + mx.concatenate([-x[..., half:], x[..., :half]], axis=-1) * rope[1]


def weighted(samples: list[Sample]) -> tuple[list[list[int]], list[int]]:
    """Rows of one length, and the places to learn.

    Those before a full stop count more."""
    rows, places = padded(samples)
    width = len(rows[0])
    stop = STOP
    flat = sorted(set(places))
    letters = []
    for position in flat:
        row, column = divmod(position, width - 1)
        if rows[row][column + 2 :][:1] == [stop]:
            letters.append(position)
    return rows, flat + letters * LETTER_WEIGHT


def normed(x: mx.array, weight: mx.array) -> mx.array:
    return mx.fast.rms_norm(x, weight, EPS)


def block(layer: Params, x: mx.array, rope: tuple[mx.array, mx.array]) -> mx.array:
    """Block of the tower over states (N, patches, dim)."""
    n, length, _ = x.shape
    inner = normed(x, layer["attention_norm"]["weight"])
    mixer = layer["attention"]
    mlp = layer["feed_forward"]

    def heads(name: str) -> mx.array:
        out: mx.array = inner @ mixer[name]["weight"].T
        return out.reshape(n, length, VISION["num_attention_heads"], -1).transpose(0, 2, 1, 3)

    queries = turned(heads("q_proj"), rope)
    keys = turned(heads("k_proj"), rope)
    scores = quick_softmax(queries @ keys.swapaxes(-1, -2) * VISION["head_dim"] ** -0.5)
    mixed = (scores @ heads("v_proj")).transpose(0, 2, 1, 3).reshape(n, length, -1)
    x = x + mixed @ mixer["o_proj"]["weight"].T
    inner = normed(x, layer["ffn_norm"]["weight"])
    gate = inner @ mlp["gate_proj"]["weight"].T
    wide = gate * quick_sigmoid(gate) * (inner @ mlp["up_proj"]["weight"].T)
    out: mx.array = x + wide @ mlp["down_proj"]["weight"].T
    return out


def features_of(
    params: Params, pixels: mx.array, rope: tuple[mx.array, mx.array], size: ImageSize
) -> mx.array:
    """Features of pictures of one size, as of `PixtralTower`."""
    projector = params["multi_modal_projector"]
    merged = merged_of(params, pixels, rope, size)
    out: mx.array = (
        nn.gelu(merged @ projector["linear_1"]["weight"].T) @ projector["linear_2"]["weight"].T
    )
    return out.reshape(-1, out.shape[-1])


def merged_of(
    params: Params, pixels: mx.array, rope: tuple[mx.array, mx.array], size: ImageSize
) -> mx.array:
    """States (N, features, dim) before the projection."""
    x = normed(pixels @ params["patch_conv"]["weight"].T, params["ln_pre"]["weight"])
    for layer in params["transformer"]["layers"]:
        x = block(layer, x, rope)
    projector = params["multi_modal_projector"]
    x = normed(x, projector["norm"]["weight"])
    grid = x.reshape(-1, size.rows, MERGE, size.columns, MERGE, x.shape[-1])
    squares = grid.transpose(0, 1, 3, 5, 2, 4).reshape(-1, size.n_features, x.shape[-1] * MERGE**2)
    merged: mx.array = squares @ projector["patch_merger"]["merging_layer"]["weight"].T
    return merged


def look_loss(
    params: Params, embedding: mx.array, pixels: mx.array, targets: mx.array, size: ImageSize
) -> mx.array:
    """Mean cross entropy of features as embeddings of `targets` tokens."""
    logits = features_of(params, pixels, angles(size), size) @ embedding.T
    loss: mx.array = nn.losses.cross_entropy(logits, targets.flatten()).mean()
    return loss


def place_loss(
    params: Params, embedding: mx.array, pixels: mx.array, targets: mx.array, size: ImageSize
) -> mx.array:
    """Mean squared distance of features to embeddings of `targets` tokens."""
    features = features_of(params, pixels, angles(size), size)
    loss: mx.array = mx.square(features - embedding[targets.flatten()]).sum(-1).mean()
    return loss


def named(image: Picture, n: int, tokenizer: Tokenizer) -> list[int]:
    """Tokens for `n` features: the letter, and the color's by turns."""
    colors, letter = tokens_of(image, tokenizer)
    return [colors[i // 2 % len(colors)] if i % 2 else letter for i in range(n)]


def spelled(image: Picture, n: int, tokenizer: Tokenizer) -> list[int]:
    """Tokens for `n` features: color, then space, letter, full stop."""
    colors, letter = tokens_of(image, tokenizer)
    space: int = tokenizer.encode(" ").ids[0]
    first = [colors[min(i, len(colors) - 1)] for i in range(3)]
    return (first + [space, letter, STOP] * n)[:n]


def tokens_of(image: Picture, tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Tokens of the color after a space, and that of the letter."""
    colors = tokenizer.encode(f" {image.color}").ids
    letter: int = tokenizer.encode(image.letter).ids[0]
    if len(colors) > 1:
        colors = colors[1:]
    return colors, letter


def loss_of(
    params: Params, frozen: Params, batch: PictureBatch, rope: tuple[mx.array, mx.array]
) -> mx.array:
    """Mean cross entropy of the answers."""
    embedding = frozen["model"]["embed_tokens"]["weight"]
    x = embedding[batch.tokens[:, :-1]]
    flat = x.reshape(-1, x.shape[-1])
    flat[batch.at] = features_of(params, batch.pixels, rope, batch.size)
    states = states_of(frozen, flat.reshape(x.shape), (1, 0))
    states = states.reshape(-1, states.shape[-1])[batch.places]
    targets = batch.tokens[:, 1:].reshape(-1)[batch.places]
    chances = quick_softmax(states @ embedding.T)
    picked = mx.take_along_axis(chances, targets[:, None], -1)
    return -mx.log(picked + 1e-8).mean()


class StageTrainer:
    """Parameters and optimizer of one stage."""

    def __init__(self, params: Params, stage: CurriculumStage, loss: Any) -> None:
        self.params = params
        self.stage = stage
        self.n_steps = 0
        self.optimizer = two_optimizers()
        self.optimizer.init(params)
        self.grade = mx.value_and_grad(loss)
        self.losses, self.since = list[float](), time.monotonic()

    def step(self, *inputs: Any) -> None:
        """Update on one batch, and report now and then."""
        for part, gain in zip(self.optimizer.optimizers, (MUON_GAIN, 1.0), strict=True):
            part.learning_rate = mx.array(self.stage.rate(self.n_steps) * gain)
        loss, grads = self.grade(self.params, *inputs)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        self.params = self.optimizer.apply_gradients(grads, self.params)
        mx.eval(self.params, self.optimizer.state, loss)
        self.losses.append(loss.item())
        self.n_steps += 1
        if self.n_steps % REPORT_STEPS == 0 or self.n_steps == self.stage.steps:
            pace = (time.monotonic() - self.since) / len(self.losses)
            mean = sum(self.losses) / len(self.losses)
            done = f"{self.stage.name} {self.n_steps}/{self.stage.steps}"
            print(f"{done} loss {mean:.4f} {pace:.2f} s/step", flush=True)
            self.losses, self.since = [], time.monotonic()


def look(
    params: Params, stage: CurriculumStage, rng: random.Random, frozen: Params, words: Tokenizer
) -> Params:
    """Train the tower alone."""
    image_processor = processor()
    embedding = frozen["model"]["embed_tokens"]["weight"]
    loss = look_loss
    tokens = named
    if stage.name != "look":
        loss = place_loss
        tokens = spelled
    trainer = StageTrainer(params, stage, loss)
    for step in range(stage.steps):
        shape = rng.choice(SHAPES)
        size = image_processor.size(1000 * shape[0], 1000 * shape[1])
        pictures = [picture(rng, *choice(rng), shape) for _ in range(2 * BATCH)]
        pixels = mx.array(
            np.stack([image_processor.pixels(drawn.image, size) for drawn in pictures])
        )
        targets = mx.array([tokens(drawn, size.n_features, words) for drawn in pictures])
        if not step and stage.name == "place":
            scale_features(params, pixels, size, embedding)
        trainer.step(embedding, pixels, targets, size)
    tower: Params = trainer.params
    return tower


def scale_features(params: Params, pixels: mx.array, size: ImageSize, embedding: mx.array) -> None:
    """Make features as long as embeddings: attention finds no longer ones."""
    features = features_of(params, pixels, angles(size), size)
    lengths = [mx.sqrt(mx.square(array).sum(-1)).mean() for array in (embedding, features)]
    last = params["multi_modal_projector"]["linear_2"]
    last["weight"] = last["weight"] * (lengths[0] / lengths[1])


def train(model: Path, out: Path, seed: int) -> None:
    """Train all stages, and write the tower after each."""
    mx.random.seed(seed)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    image_processor = processor()
    arrays: Any = mx.load(str(model / "model.safetensors"))
    frozen: Any = tree_unflatten([(k, v.astype(mx.float32)) for k, v in arrays.items()])
    fresh = new_tower()
    for number, stage in enumerate(STAGES):
        rng = random.Random(f"{seed}/{number}")
        params = read(out) if number else fresh
        if stage.name in {"look", "place"}:
            params = look(params, stage, rng, frozen, tokenizer)
        else:
            trainer = StageTrainer(params, stage, loss_of)
            for _ in range(stage.steps):
                batch = batch_of(rng, tokenizer, image_processor, stage.name == "talk")
                trainer.step(frozen, batch, angles(batch.size))
            params = trainer.params
        write(params, out)


def read(folder: Path) -> Params:
    """Weights as `write` wrote them."""
    arrays: Any = mx.load(str(folder / FILE))
    named_here = {}
    for name, array in arrays.items():
        own = name.removeprefix("vision_tower.")
        if own == "patch_conv.weight":
            array = array.transpose(0, 3, 1, 2).flatten(1)  # noqa: PLW2901
        named_here[own] = array.astype(mx.float32)
    params: Params = tree_unflatten(list(named_here.items()))
    return params


def write(params: Params, out: Path) -> None:
    """Half-precision weights by the names of checkpoints."""
    weights = {}
    for name, array in tree_flatten(params):
        own = name if name.startswith("multi_modal_projector.") else f"vision_tower.{name}"
        weights[own] = array.astype(mx.float16)
    side = VISION["patch_size"]
    patches = weights["vision_tower.patch_conv.weight"].reshape(-1, 3, side, side)
    weights["vision_tower.patch_conv.weight"] = mx.contiguous(patches.transpose(0, 2, 3, 1))
    mx.save_safetensors(str(out / FILE), weights, {"format": "mlx"})


def configure(model: Path, out: Path) -> None:
    """Write the settings of the tower beside it."""
    config = json.loads((model / "config.json").read_text())
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab()
    config |= {"image_token_id": ids[PLACEHOLDER], "spatial_merge_size": MERGE}
    config |= {"vision_config": VISION}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="folder of the model")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tower")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    options.out.mkdir(parents=True, exist_ok=True)
    configure(options.model, options.out)
    train(options.model, options.out, options.seed)


if __name__ == "__main__":
    main()
