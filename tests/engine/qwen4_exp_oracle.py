"""Writes the logits of transformers for the models of `qwen4_exp_folder.py`.

`make logits` runs it in an environment of its own, with PyTorch. transformers does not say which
of several blocks with the same score its indexer takes; for the model `ties` it takes the last
ones, as MLX does.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import Qwen4ExpForConditionalGeneration

from tests.engine import qwen4_exp_folder as folders

FIXTURE = Path(__file__).with_name("qwen4_exp.safetensors")
TIES = "ties"
TOP_K = torch.Tensor.topk


class Chosen(NamedTuple):
    """Part of the result of `topk` that the indexer reads."""

    indices: Any


def last_first(scores: Any, k: int, dim: int = -1, **more: Any) -> Any:
    """`topk` by score, then by position, descending; that of the router as it is."""
    if scores.ndim != 1:
        return TOP_K(scores, k, dim=dim, **more)
    positions = torch.argsort(scores.flip(0), descending=True, stable=True)
    return Chosen(len(scores) - 1 - positions[:k])


def loaded(folder: Path) -> Any:
    """The model; every weight of its text must come from the folder, and its buffers agree."""
    model, found = Qwen4ExpForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    missing = [name for name in found["missing_keys"] if not name.startswith("model.visual.")]
    assert not missing and not found["unexpected_keys"], (missing, found["unexpected_keys"])
    read = dict(model.named_buffers())
    fresh = Qwen4ExpForConditionalGeneration(model.config)
    for name, buffer in fresh.named_buffers():
        assert torch.equal(buffer, read[name]), name
    return model.eval()


def logits_of(model: Any, tokens: list[int]) -> Any:
    """Logits (tokens, vocabulary), computed at once and without a cache."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """Tokens after the prompt, each from all tokens before."""
    tokens = list(prompt)
    for _ in range(folders.N_ANSWERED):
        tokens.append(int(logits_of(model, tokens)[-1].argmax()))
    answer = tokens[len(prompt) :]
    assert folders.EOS not in answer, "an answer must not end early"
    return answer


def recorded(kind: str) -> dict[str, np.ndarray]:
    """Logits of the first prompt and answers of all, by names of the fixture."""
    with TemporaryDirectory() as name:
        model = loaded(folders.write(Path(name), kind))
    first = folders.prompts()[0]
    plain = logits_of(model, first)
    if kind == TIES:
        torch.Tensor.topk = last_first
        logits = logits_of(model, first)
        assert (logits - plain).abs().max() > 0.1, "no two blocks had the same score"
    else:
        logits = plain
    answers = [greedy(model, prompt) for prompt in folders.prompts()]
    torch.Tensor.topk = TOP_K
    assert len({tuple(answer) for answer in answers}) == len(answers)
    part = np.ascontiguousarray(logits[:, :: folders.EVERY].numpy())
    return {f"{kind}.logits": part, f"{kind}.answers": np.array(answers, np.int32)}


def main() -> None:
    """Write the fixture."""
    torch.set_num_threads(1)
    with torch.no_grad():
        arrays = [recorded(kind) for kind in folders.CONFIGS]
    save_file({name: array for part in arrays for name, array in part.items()}, str(FIXTURE))


if __name__ == "__main__":
    main()
