"""Train the demo model from nothing: tokenizer, copying, then dialogues."""

import argparse
import json
import random
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.llama import Model, ModelArgs

from mlxstack.demo import MODEL_DIR
from mlxstack.demo.training.copy_task import Sample
from mlxstack.demo.training.curriculum import (
    STAGES,
    CurriculumStage,
    batches_of,
    make_tokenizer,
    padded,
)
from mlxstack.demo.training.tokenizer import N_TOKENS, SPECIAL_TOKENS

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 160,
    "num_hidden_layers": 6,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 40,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": N_TOKENS,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}
REPORT_STEPS = 50
MUON_GAIN = 3.0
CHUNK = 128
SQUARINGS = 8
THETA: float = CONFIG["rope_theta"]
Params = dict[str, Any]
Leap = tuple[int, int]


def softmax_by_squares(scores: mx.array) -> mx.array:
    """Softmax over the last axis with exp(x) = (1 + x/256)^256, faster."""
    shifted = scores - scores.max(-1, keepdims=True)
    powers: mx.array = mx.maximum(1 + shifted / 2**SQUARINGS, 0)
    for _ in range(SQUARINGS):
        powers = powers * powers
    return powers / powers.sum(-1, keepdims=True)


def softmax_vjp(_: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    weighted = cotangent * output
    return weighted - output * weighted.sum(-1, keepdims=True)


def sigmoid_by_squares(x: mx.array) -> mx.array:
    powers: mx.array = 1 - mx.clip(x, -30, 30) / 2**SQUARINGS
    for _ in range(SQUARINGS):
        powers = powers * powers
    return 1 / (1 + powers)


def sigmoid_vjp(_: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    return cotangent * output * (1 - output)


quick_softmax: Any = mx.custom_function(softmax_by_squares)
quick_softmax.vjp(softmax_vjp)
quick_sigmoid: Any = mx.custom_function(sigmoid_by_squares)
quick_sigmoid.vjp(sigmoid_vjp)


def attend(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """Causal attention in query chunks that fit the CPU's cache."""
    length = queries.shape[-2]
    outputs = []
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        visible = mx.arange(stop) <= mx.arange(start, stop)[:, None]
        scores = queries[..., start:stop, :] @ keys[..., :stop, :].swapaxes(-1, -2)
        scores = scores + mx.where(visible, 0.0, -1e9)
        outputs.append(quick_softmax(scores) @ values[..., :stop, :])
    return mx.concatenate(outputs, axis=-2)


def rotate(x: mx.array, leap: Leap) -> mx.array:
    """Rotary positions, with a leap: from `cut` on, they are `gap` further than they are."""
    rope = partial(mx.fast.rope, dims=x.shape[-1], traditional=False, base=THETA, scale=1.0)
    cut, gap = leap
    before = rope(x[..., :cut, :], offset=0)
    after = rope(x[..., cut:, :], offset=cut + gap)
    return mx.concatenate([before, after], axis=-2)


def attention(layer: Params, x: mx.array, leap: Leap) -> mx.array:
    rows, length, _ = x.shape
    n_heads = CONFIG["num_attention_heads"]
    n_kv = CONFIG["num_key_value_heads"]
    width = CONFIG["head_dim"]

    def heads(name: str, count: int) -> mx.array:
        out: mx.array = x @ layer[name]["weight"].T
        return out.reshape(rows, length, count, width).transpose(0, 2, 1, 3)

    queries = rotate(heads("q_proj", n_heads) * width**-0.5, leap)
    queries = queries.reshape(rows, n_kv, n_heads // n_kv, length, width)
    keys = rotate(heads("k_proj", n_kv), leap)
    values = heads("v_proj", n_kv)
    mixed = attend(queries, keys[:, :, None], values[:, :, None])
    mixed = mixed.reshape(rows, n_heads, length, width).transpose(0, 2, 1, 3)
    out: mx.array = mixed.reshape(rows, length, -1) @ layer["o_proj"]["weight"].T
    return out


def decoder_layer(layer: Params, x: mx.array, leap: Leap) -> mx.array:
    """Llama layer over states (B, T, dim)."""
    eps = CONFIG["rms_norm_eps"]
    normed = mx.fast.rms_norm(x, layer["input_layernorm"]["weight"], eps)
    x = x + attention(layer["self_attn"], normed, leap)
    normed = mx.fast.rms_norm(x, layer["post_attention_layernorm"]["weight"], eps)
    mlp = layer["mlp"]
    gate = normed @ mlp["gate_proj"]["weight"].T
    inner = gate * quick_sigmoid(gate) * (normed @ mlp["up_proj"]["weight"].T)
    out: mx.array = x + inner @ mlp["down_proj"]["weight"].T
    return out


def hidden(params: Params, tokens: mx.array, leap: Leap) -> mx.array:
    """Llama forward pass on mlx-lm's weights, fast on a CPU."""
    return states_of(params, params["model"]["embed_tokens"]["weight"][tokens], leap)


def states_of(params: Params, x: mx.array, leap: Leap) -> mx.array:
    """Last hidden states of embeddings (B, T, dim)."""
    model = params["model"]
    for layer in model["layers"]:
        x = decoder_layer(layer, x, leap)
    return mx.fast.rms_norm(x, model["norm"]["weight"], CONFIG["rms_norm_eps"])


def loss_of(params: Params, tokens: mx.array, places: mx.array, leap: Leap) -> mx.array:
    """Mean cross entropy at `places`, flat indices into the targets."""
    states = hidden(params, tokens[:, :-1], leap)
    states = states.reshape(-1, states.shape[-1])[places]
    targets = tokens[:, 1:].reshape(-1)[places]
    chances = quick_softmax(states @ params["model"]["embed_tokens"]["weight"].T)
    picked = mx.take_along_axis(chances, targets[:, None], -1)
    return -mx.log(picked + 1e-8).mean()


def collate(samples: list[Sample]) -> tuple[mx.array, mx.array]:
    rows, places = padded(samples)
    return mx.array(rows), mx.array(places)


def two_optimizers() -> Any:
    """Muon for inner matrices, AdamW for embedding and norms."""
    inner = optim.Muon(1e-2, weight_decay=0.0)
    outer = optim.AdamW(1e-3, betas=[0.9, 0.98], bias_correction=True)
    return optim.MultiOptimizer(
        [inner, outer], [lambda name, weight: weight.ndim == 2 and "embed" not in name]
    )


class Trainer:
    """The model and its optimizer, one step at a time, with a checkpoint to go on from."""

    def __init__(self, work: Path, seed: int) -> None:
        mx.random.seed(seed)
        self.checkpoint = work / "checkpoint.safetensors"
        self.model = Model(ModelArgs.from_dict(CONFIG))
        self.optimizer = two_optimizers()
        self.grade = mx.value_and_grad(loss_of)
        self.rng = random.Random(seed)
        self.n_steps = 0
        ready_to_copy(self.model)
        self.optimizer.init(self.model.trainable_parameters())
        if self.checkpoint.exists():
            self.resume()

    def resume(self) -> None:
        loaded: Any = mx.load(str(self.checkpoint), return_metadata=True)
        arrays, note = loaded
        tree: Any = tree_unflatten(list(arrays.items()))
        self.model.update(tree["weights"])
        self.optimizer.state = tree["optimizer"]
        self.n_steps = int(note["n_steps"])

    def save(self) -> None:
        tree = {"weights": self.model.parameters(), "optimizer": self.optimizer.state}
        new = self.checkpoint.with_suffix(".new.safetensors")
        note = {"n_steps": str(self.n_steps)}
        mx.save_safetensors(str(new), dict(tree_flatten(tree)), note)
        new.replace(self.checkpoint)

    def step(self, samples: list[Sample], rate: float, gap: int) -> float:
        tokens, places = collate(samples)
        leap = (self.rng.randint(1, tokens.shape[1] - 2), gap)
        for optimizer, gain in zip(self.optimizer.optimizers, (MUON_GAIN, 1.0), strict=True):
            optimizer.learning_rate = mx.array(rate * gain)
        loss, grads = self.grade(self.model.parameters(), tokens, places, leap)
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        self.optimizer.update(self.model, grads)
        mx.eval(self.model.state, self.optimizer.state, loss)
        self.n_steps += 1
        mean: Any = loss.item()
        return float(mean)

    def run(self, stage: CurriculumStage, first: int, batches: Iterator[list[Sample]]) -> None:
        """Steps `first` to the end of the stage."""
        losses = list[float]()
        since = time.monotonic()
        for step in range(first, stage.steps):
            gap = 0
            if self.rng.random() < 0.5:
                gap = self.rng.randint(0, stage.most_gap)
            losses.append(self.step(next(batches), stage.rate(step), gap))
            if (step + 1) % REPORT_STEPS == 0 or step + 1 == stage.steps:
                pace = (time.monotonic() - since) / len(losses)
                loss = sum(losses) / len(losses)
                progress = f"{stage.name} {step + 1}/{stage.steps}"
                print(f"{progress} loss {loss:.4f} {pace:.2f} s/step", flush=True)
                self.save()
                losses = []
                since = time.monotonic()


def train(out: Path, work: Path, seed: int) -> None:
    """Train all stages, from the checkpoint in `work` if any."""
    work.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(out, seed)
    trainer = Trainer(work, seed)
    begun = 0
    for number, stage in enumerate(STAGES):
        first = trainer.n_steps - begun
        begun = begun + stage.steps
        if trainer.n_steps >= begun:
            continue
        rng = random.Random(f"{seed}/{number}/{first}")
        trainer.run(stage, first, batches_of(rng, stage, tokenizer))
        export(trainer.model, out)


def export(model: Model, out: Path) -> None:
    """Everything that mlx-lm needs, in half precision."""
    weights = {k: v.astype(mx.float16) for k, v in tree_flatten(model.parameters())}
    mx.save_safetensors(str(out / "model.safetensors"), weights, {"format": "mlx"})
    end = SPECIAL_TOKENS.index("<|im_end|>")
    pad = SPECIAL_TOKENS.index("<|endoftext|>")
    config = CONFIG | {"torch_dtype": "float16", "eos_token_id": end, "pad_token_id": pad}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {"eos_token_id": [end, pad], "pad_token_id": pad, "do_sample": False}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if out.resolve() != MODEL_DIR.resolve():
        shutil.copy(MODEL_DIR / "chat_template.jinja", out)


def orthonormal(rows: int) -> mx.array:
    """`rows` orthonormal vectors that leave the shared first coordinate alone."""
    q, _ = mx.linalg.qr(mx.random.normal((CONFIG["hidden_size"], rows)), stream=mx.cpu)
    return q.T * (mx.arange(CONFIG["hidden_size"]) > 0)


def looking_back(steps: int, gain: float = 1.6, n_pairs: int = 8) -> tuple[mx.array, mx.array]:
    """Query and key columns whose product peaks `steps` tokens back, by rotation alone."""
    width = CONFIG["head_dim"]
    speeds = CONFIG["rope_theta"] ** (-mx.arange(width // 2) * 2 / width)
    is_fast = mx.arange(width // 2) < n_pairs
    queries = mx.concatenate([mx.cos(steps * speeds) * is_fast, -mx.sin(steps * speeds) * is_fast])
    return gain * queries, gain * mx.concatenate([is_fast, mx.zeros(width // 2)])


def ready_to_copy(model: Model) -> None:
    """Start two heads as what copying needs: one looks back, one finds what came before.

    From a plain random start the two have to be found together, which takes far longer.
    """
    width = CONFIG["head_dim"]
    embedding = model.model.embed_tokens
    embedding.weight = embedding.weight.at[:, 0].multiply(0).at[:, 0].add(0.3)
    shared = orthonormal(3 * width)
    token = shared[:width]
    before = shared[width : 2 * width]
    earlier = shared[2 * width :]
    first = model.model.layers[0].self_attn
    one_back = looking_back(1)
    two_back = looking_back(2)
    first.q_proj.weight[: 2 * width] = 0
    first.k_proj.weight[:width] = 0
    first.q_proj.weight[:width, 0] = one_back[0]
    first.q_proj.weight[width : 2 * width, 0] = two_back[0]
    first.k_proj.weight[:width, 0] = one_back[1]
    first.v_proj.weight[:width] = token
    first.o_proj.weight[:, :width] = 0.1 * before.T
    first.o_proj.weight[:, width : 2 * width] = 0.1 * earlier.T
    for layer in model.model.layers[1:3]:
        copied = orthonormal(width)
        layer.self_attn.q_proj.weight[:width] = 1.3 * token
        layer.self_attn.k_proj.weight[:width] = 1.3 * before
        layer.self_attn.v_proj.weight[:width] = copied
        layer.self_attn.o_proj.weight[:, :width] = 0.1 * copied.T


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--work", type=Path, help="folder for checkpoints (OUT/.work)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    train(options.out, options.work or options.out / ".work", options.seed)


if __name__ == "__main__":
    main()
