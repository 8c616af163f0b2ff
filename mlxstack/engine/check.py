"""The self-check at load: do rows of a batch, seen through the view, get what they get alone?"""

from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxstack.engine.caches import CacheMaker, describe
from mlxstack.engine.context import Context
from mlxstack.engine.rows import view

LENGTHS = (5, 11)
STEPS = 3
TOLERANCE = 2e-2


class Verdict(Struct, frozen=True):
    """Whether the model may be batched by row, and if not, why. `kv` describes its caches."""

    is_batching: bool
    why_not: str | None
    kv: str


def self_check(model: Any, maker: CacheMaker, n_vocab: int) -> Verdict:
    """Decode two short prompts of different length alone and together, and compare the logits."""
    prompts = [[(7 * i + 3 * n) % n_vocab for i in range(n)] for n in LENGTHS]
    alone = [_alone(model, _prefilled(model, maker, p), p[-1]) for p in prompts]
    contexts = [_prefilled(model, maker, p) for p in prompts]
    kv = describe(contexts[0].caches)
    try:
        together = _together(model, contexts, [list(tokens) for _, tokens in alone], prompts)
    except Exception as error:
        return Verdict(False, f"the row view cannot serve it: {error}".splitlines()[0], kv)
    worst = max(_distance(a, b) for (a, _), b in zip(alone, together, strict=True))
    if not worst <= TOLERANCE:
        return Verdict(False, f"in a batch its logits differ from alone by {worst:.3g}", kv)
    return Verdict(True, None, kv)


def _prefilled(model: Any, maker: CacheMaker, prompt: list[int]) -> Context:
    context = Context(maker)
    model(mx.array([prompt[:-1]]), cache=context.caches)
    context.tokens = prompt[:-1]
    context.evaluate()
    return context


def _alone(model: Any, context: Context, token: int) -> tuple[list[mx.array], list[int]]:
    outputs, fed = [], []
    for _ in range(STEPS):
        fed.append(token)
        logits = model(mx.array([[token]]), cache=context.caches)[0, -1]
        outputs.append(logits.astype(mx.float32))
        token = int(mx.argmax(logits).item().real)
    return outputs, fed


def _together(
    model: Any, contexts: list[Context], fed: list[list[int]], prompts: list[list[int]]
) -> list[list[mx.array]]:
    outputs: list[list[mx.array]] = [[] for _ in prompts]
    for step in range(STEPS):
        views = [view(caches) for caches in zip(*(c.caches for c in contexts), strict=True)]
        logits = model(mx.array([[tokens[step]] for tokens in fed]), cache=views)[:, -1]
        mx.eval(logits)
        for i, output in enumerate(outputs):
            output.append(logits[i].astype(mx.float32))
    return outputs


def _distance(one: list[mx.array], other: list[mx.array]) -> float:
    """Largest difference of logits, relative to their spread."""
    pairs = zip(one, other, strict=True)
    ratios = [mx.abs(a - b).max() / mx.maximum(mx.abs(a).max(), 1e-6) for a, b in pairs]
    return float(mx.stack(ratios).max().item().real)
