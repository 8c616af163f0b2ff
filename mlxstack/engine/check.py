"""The self-check at load: do rows of a batch, seen through the view, get what they get alone?

The last row reaches past every window of the model. Its KV there is random, which costs no
prefill and is just as good: alone and together see the same.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, QuantizedKVCache
from msgspec import Struct

from mlxstack.core.errors import SetupError
from mlxstack.engine import layers
from mlxstack.engine.caches import CacheMaker, describe
from mlxstack.engine.context import Context
from mlxstack.engine.rows import view

LENGTHS = (5, 11, 8)
STEPS = 3
TOLERANCE = 2e-2
MOST_TOLERANCE = 0.2
LONGEST_WINDOW = 8192
SPARSE = 2048
"""A layer with several caches keeps an index beside its KV, and is sparse beyond this length."""

Logits = list[mx.array]


class Verdict(Struct, frozen=True):
    """Whether the model may be batched by row, and if not, why. `kv` describes its caches."""

    is_batching: bool
    why_not: str | None
    kv: str


def self_check(model: Any, maker: CacheMaker, n_vocab: int) -> Verdict:
    """Decode prompts of different length alone and together, and compare the logits.

    Raises SetupError when the model cannot even run alone, such as with a KV precision that its
    code does not know.
    """
    prompts = [[(7 * i + 3 * n) % n_vocab for i in range(n)] for n in LENGTHS]
    try:
        alone = [_alone(model, c, p) for c, p in _rows(model, maker, prompts)]
        allowed = _allowed(model, maker, prompts[1], alone[1])
    except Exception as error:
        raise SetupError(_cannot(maker, error)) from error
    rows = _rows(model, maker, prompts)
    kv = describe(rows[0][0].caches)
    try:
        together = _together(model, [context for context, _ in rows], [fed for _, fed in alone])
    except Exception as error:
        return Verdict(False, f"the row view cannot serve it: {_words(error)}", kv)
    worst = max(_distance(a, b) for (a, _), b in zip(alone, together, strict=True))
    if not worst <= allowed:
        return Verdict(False, f"in a batch its logits differ from alone by {worst:.3g}", kv)
    return Verdict(True, None, kv)


def _rows(
    model: Any, maker: CacheMaker, prompts: Sequence[list[int]]
) -> list[tuple[Context, list[int]]]:
    """A context for each prompt but its last token; the last one lengthened and quantised."""
    contexts = [_prefilled(model, maker, p) for p in prompts]
    long = contexts[-1]
    n_more = _reach(long)
    for seed, leaf in enumerate(long.leaves):
        layers.lengthen(leaf, n_more, seed)
    if maker.turning_point:
        long.caches = maker.quantise(long.caches)
    long.evaluate()
    return list(zip(contexts, prompts, strict=True))


def _reach(context: Context) -> int:
    """How many tokens lie beyond every window and in the sparse part of sparse layers."""
    windows = [layers.window_of(leaf) for leaf in context.leaves]
    lists = [len(list(layers.leaves([c]))) for c in context.caches if isinstance(c, CacheList)]
    sparse = SPARSE if max(lists, default=0) > 1 else 0
    return min(max(*windows, sparse, 0), LONGEST_WINDOW) + LENGTHS[0]


def _prefilled(model: Any, maker: CacheMaker, prompt: list[int], n_rows: int = 1) -> Context:
    context = Context(maker)
    model(mx.array([prompt[:-1]] * n_rows), cache=context.caches)
    context.tokens = prompt[:-1]
    context.evaluate()
    return context


def _alone(model: Any, context: Context, prompt: list[int]) -> tuple[Logits, list[int]]:
    outputs, fed, token = [], [], prompt[-1]
    for _ in range(STEPS):
        fed.append(token)
        logits = model(mx.array([[token]]), cache=context.caches)[0, -1]
        outputs.append(logits.astype(mx.float32))
        token = int(mx.argmax(logits).item().real)
    return outputs, fed


def _together(model: Any, contexts: Sequence[Context], fed: Sequence[list[int]]) -> list[Logits]:
    outputs: list[Logits] = [[] for _ in fed]
    for step in range(STEPS):
        views = [view(caches) for caches in zip(*(c.caches for c in contexts), strict=True)]
        logits = model(mx.array([[tokens[step]] for tokens in fed]), cache=views)[:, -1]
        mx.eval(logits)
        for i, output in enumerate(outputs):
            output.append(logits[i].astype(mx.float32))
    return outputs


def _allowed(
    model: Any, maker: CacheMaker, prompt: list[int], alone: tuple[Logits, list[int]]
) -> float:
    """What batching by itself does to this model's logits, three times over.

    Matrices of other shapes round otherwise, and in half precision that can flip an expert.
    """
    context = _prefilled(model, maker, prompt, n_rows=2)
    twins = [model(mx.array([[t], [t]]), cache=context.caches)[0, -1] for t in alone[1]]
    noise = _distance(alone[0], [logits.astype(mx.float32) for logits in twins])
    return min(max(TOLERANCE, 3 * noise), MOST_TOLERANCE)


def _distance(one: Logits, other: Logits) -> float:
    """Largest difference of logits, relative to their size; equal infinities do not differ."""
    ratios = []
    for a, b in zip(one, other, strict=True):
        scale = mx.where(mx.isinf(a), 0, mx.abs(a)).max()
        ratios.append(mx.where(a == b, 0, mx.abs(a - b)).max() / mx.maximum(scale, 1e-6))
    return float(mx.stack(ratios).max().item().real)


def _cannot(maker: CacheMaker, error: Exception) -> str:
    quantised = maker.quantise(maker.make()) if maker.turning_point else maker.make()
    bits = {leaf.bits for leaf in layers.leaves(quantised) if isinstance(leaf, QuantizedKVCache)}
    if bits:
        return (
            f"the model cannot keep its KV in {bits.pop()} bits ({_words(error)}); "
            "set kv.bits to 16"
        )
    return f"the model breaks at its first tokens: {_words(error)}"


def _words(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"
