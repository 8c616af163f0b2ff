"""Self-check at load: batched rows get the same logits as alone.

The last row reaches past every window of the model. Its KV there is random, which costs no
prefill and is just as good: alone and together see the same.

Rounding is no fault. Matrices of other shapes are multiplied by other kernels, and in half
precision that can send a token to another expert. So a difference counts only when it is larger
than rounding explains, changes which tokens are likely, and comes back with other tokens.

The same comparison tells whether rows may bring several tokens to a pass and take the last of
them back, which speculative decoding needs.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import inf, isnan
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, QuantizedKVCache
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.errors import SetupError
from mlxstack.engine.decode.row_stack import RowStack
from mlxstack.engine.device_errors import raise_device_error
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.cache_adapters import CacheFactory, describe
from mlxstack.engine.model.runner import ModelRunner, PassStart, SlotTokens

LENGTHS = (5, 11, 8)
STEPS = 3
N_TRIALS = 3
"""Trials: view faults show with any tokens, expert flips with few."""

TOLERANCES = {mx.float32: 2e-2, mx.float16: 2e-2, mx.bfloat16: 0.15}
"""Tolerated relative differences of logits, about three times the rounding.

Measured on dense, sliding-window, sink, hybrid and MLA models with the rounding of each layer
imitated (tests/mac/test_self_check.py): at most 0.0067 in float16 and 0.054 in bfloat16 while no
expert flips; 5e-7 in float32 on a CPU. GPUs may multiply float32 in TF32, which rounds as float16.
"""

MOST_TOLERANCE = 0.2
MOST_WITH_AGREEMENT = 0.5
"""Beyond this no agreement of the likely tokens excuses a difference."""

N_LIKELY = 10
AGREEMENT = 0.6
"""Minimum common share of the likeliest tokens, alone and batched.

0.7 was measured when an expert flips; mixed-up rows are near 0.
"""

LONGEST_WINDOW = 8192
SPARSE = 2048
"""Length beyond which indexed (CacheList) layers attend sparsely."""

Logits = list[mx.array]


class BatchingCheck(Struct, frozen=True):
    """Verdict on batching a model, with reason; `kv` describes its caches.

    `can_draft`: rows may bring several tokens to a pass and take some of them back; `is_ragged`: in
    one pass with other rows; `can_stack`: rows may be stacked.
    """

    is_batching: bool
    why_not: str | None
    kv: str
    can_draft: bool = False
    is_ragged: bool = False
    can_stack: bool = False


class Comparison(Struct, frozen=True):
    """Largest difference of logits, relative to their size, and smallest top-k agreement."""

    distance: float
    agreement: float

    def is_same(self, allowed: float, dtype: mx.Dtype) -> bool:
        """Whether rounding explains it. In float32 nothing but the distance counts."""
        if self.distance <= allowed:
            return True
        is_half = dtype != mx.float32
        return is_half and self.distance <= MOST_WITH_AGREEMENT and self.agreement >= AGREEMENT


def self_check(model: Any, cache_factory: CacheFactory, n_vocab: int) -> BatchingCheck:
    """Decode prompts of different length alone and together, and compare the logits.

    Raises SetupError when the model cannot even run alone, such as with a KV precision that its
    code does not know.
    """
    dtype = _precision(model)
    runner = ModelRunner(model)
    comparisons: list[Comparison] = []
    for trial in range(N_TRIALS):
        prompts = [[(7 * i + 3 * n + 101 * trial) % n_vocab for i in range(n)] for n in LENGTHS]
        try:
            alone = [_alone(runner, c, p) for c, p in _rows(runner, cache_factory, prompts)]
            allowed = _allowed(runner, cache_factory, prompts[1], alone[1], dtype)
        except Exception as error:
            raise_device_error(error)
            raise SetupError(_cannot(cache_factory, error)) from error
        contexts = [context for context, _ in _rows(runner, cache_factory, prompts)]
        kv = describe(contexts[0].caches)
        try:
            together = _together(runner, contexts, [fed for _, fed in alone])
        except Exception as error:
            raise_device_error(error)
            why = f"the row view cannot serve it: {_words(error)}"
            return _with_drafts(BatchingCheck(False, why, kv), model, cache_factory, n_vocab)
        comparisons.append(_compare([logits for logits, _ in alone], together))
        if comparisons[-1].is_same(allowed, dtype):
            stacked = _stacked(runner, cache_factory, prompts, [fed for _, fed in alone])
            check = BatchingCheck(
                True,
                None,
                kv,
                can_stack=stacked is not None
                and _compare([logits for logits, _ in alone], stacked).is_same(allowed, dtype),
            )
            return _with_drafts(check, model, cache_factory, n_vocab)
    least = min(one.distance for one in comparisons)
    why = f"in a batch its logits differ from alone by {least:.3g} or more in {N_TRIALS} trials"
    return _with_drafts(BatchingCheck(False, why, kv), model, cache_factory, n_vocab)


def _with_drafts(
    check: BatchingCheck, model: Any, cache_factory: CacheFactory, n_vocab: int
) -> BatchingCheck:
    """Add the verdict on several tokens per row, batched or alone."""
    for is_ragged in [True, False] if check.is_batching else [False]:
        runner = ModelRunner(model, is_batching=check.is_batching, is_ragged=is_ragged)
        if _can_draft(runner, cache_factory, n_vocab):
            return replace(check, can_draft=True, is_ragged=is_ragged)
    return check


def _stacked(
    runner: ModelRunner,
    cache_factory: CacheFactory,
    prompts: Sequence[list[int]],
    fed: Sequence[list[int]],
) -> list[Logits] | None:
    """Logits of stacked rows; None where rows cannot be stacked."""
    contexts = [context for context, _ in _rows(runner, cache_factory, prompts)]
    stack = RowStack(contexts)
    if not stack.lengths:
        return None
    stack.start()
    while not stack.is_complete:
        stack.stack_more()
    try:
        return _together(runner, contexts, fed, stack)
    except Exception as error:
        # A model may use keys outside of the attention function in ways of its own.
        raise_device_error(error)
        return None


def _can_draft(runner: ModelRunner, cache_factory: CacheFactory, n_vocab: int) -> bool:
    """Whether logits are the same with drafts, some rolled back.

    A slot without others brings its draft as a sequence.
    """
    if not all(map(cache_adapters.can_roll_back, cache_adapters.leaves(cache_factory.make()))):
        return False
    dtype = _precision(runner.model)
    for trial in range(N_TRIALS):
        prompts = [[(5 * i + 3 * n + 89 * trial) % n_vocab for i in range(n)] for n in LENGTHS]
        alone = [_alone(runner, c, p) for c, p in _rows(runner, cache_factory, prompts)]
        allowed = _allowed(runner, cache_factory, prompts[1], alone[1], dtype)
        contexts = [context for context, _ in _rows(runner, cache_factory, prompts)]
        (expected, sequence), single = alone[0], _prefilled(runner, cache_factory, prompts[0])
        try:
            drafted = _drafted(runner, contexts, [fed for _, fed in alone], n_vocab)
            drafted += _execute(runner, [single], [sequence])
        except Exception as error:
            raise_device_error(error)
            return False
        if _compare([*(one for one, _ in alone), expected], drafted).is_same(allowed, dtype):
            return True
    return False


def _drafted(
    runner: ModelRunner, contexts: Sequence[SlotContext], fed: Sequence[list[int]], n_vocab: int
) -> list[Logits]:
    """Logits of two passes; row i keeps its first i + 1 tokens."""
    wrong = [
        [*tokens[: i + 1], *((t + 1) % n_vocab for t in tokens[i + 1 :])]
        for i, tokens in enumerate(fed)
    ]
    starts = [PassStart.of(context.caches, STEPS) for context in contexts]
    first = _execute(runner, contexts, wrong)
    left = [start.roll_back(i + 1) for i, start in enumerate(starts)]
    rest = [tokens[n:] for tokens, n in zip(fed, left, strict=True)]
    second = _execute(
        runner,
        [c for c, tokens in zip(contexts, rest, strict=True) if tokens],
        [tokens for tokens in rest if tokens],
    )
    again = iter(second)
    return [
        [*(logits[: i + 1]), *(next(again) if tokens else [])[i + 1 - n :]]
        for i, (logits, n, tokens) in enumerate(zip(first, left, rest, strict=True))
    ]


def _execute(
    runner: ModelRunner,
    contexts: Sequence[SlotContext],
    tokens: Sequence[list[int]],
    views: Sequence[Any] | None = None,
) -> list[Logits]:
    """Logits of every row's tokens, computed in one pass."""
    each = zip(contexts, tokens, strict=True)
    logits = runner.execute([SlotTokens(c.own_caches, mx.array(row)) for c, row in each], views)
    logits = logits.astype(mx.float32)
    mx.eval(logits)
    ends = [*accumulate(map(len, tokens))]
    return [list(logits[end - len(row) : end]) for end, row in zip(ends, tokens, strict=True)]


def _precision(model: Any) -> mx.Dtype:
    """Coarsest floating-point type of the weights, which bounds the rounding."""
    types = {array.dtype for _, array in tree_flatten(model.parameters())}
    halves = [dtype for dtype in (mx.bfloat16, mx.float16) if dtype in types]
    return halves[0] if halves else mx.float32


def _rows(
    runner: ModelRunner, cache_factory: CacheFactory, prompts: Sequence[list[int]]
) -> list[tuple[SlotContext, list[int]]]:
    """Context of each prompt without its last token; the last quantized.

    The last one is also lengthened.
    """
    contexts = [_prefilled(runner, cache_factory, p) for p in prompts]
    long = contexts[-1]
    n_more = _reach(long)
    for seed, leaf in enumerate(long.leaves):
        cache_adapters.extend_room(leaf, n_more, seed)
    if cache_factory.quantized_start:
        long.caches = cache_factory.quantize(long.caches)
    long.evaluate()
    return list(zip(contexts, prompts, strict=True))


def _reach(context: SlotContext) -> int:
    """Tokens beyond every window, in the sparse range of sparse layers."""
    windows = [cache_adapters.window_of(leaf) for leaf in context.leaves]
    lists = [
        len(list(cache_adapters.leaves([c]))) for c in context.caches if isinstance(c, CacheList)
    ]
    sparse = SPARSE if max(lists, default=0) > 1 else 0
    return min(max(*windows, sparse, 0), LONGEST_WINDOW) + LENGTHS[0]


def _prefilled(
    runner: ModelRunner, cache_factory: CacheFactory, prompt: list[int], n_rows: int = 1
) -> SlotContext:
    context = SlotContext(cache_factory)
    runner.forward(mx.array([prompt[:-1]] * n_rows), context.caches)
    context.tokens = prompt[:-1]
    context.evaluate()
    return context


def _alone(
    runner: ModelRunner, context: SlotContext, prompt: list[int]
) -> tuple[Logits, list[int]]:
    outputs, fed, token = [], [], prompt[-1]
    for _ in range(STEPS):
        fed.append(token)
        outputs += _execute(runner, [context], [[token]])[0]
        token = int(mx.argmax(outputs[-1]).item().real)
    return outputs, fed


def _together(
    runner: ModelRunner,
    contexts: Sequence[SlotContext],
    fed: Sequence[list[int]],
    stack: RowStack | None = None,
) -> list[Logits]:
    outputs: list[Logits] = [[] for _ in fed]
    for step in range(STEPS):
        views = stack.views() if stack is not None else None
        each = _execute(runner, contexts, [[tokens[step]] for tokens in fed], views)
        for output, logits in zip(outputs, each, strict=True):
            output.extend(logits)
    return outputs


def _allowed(
    runner: ModelRunner,
    cache_factory: CacheFactory,
    prompt: list[int],
    alone: tuple[Logits, list[int]],
    dtype: mx.Dtype,
) -> float:
    """Tripled difference of a plain batch of equal rows.

    At least the tolerance of the precision: two rows round less than three, and need not flip.
    """
    context = _prefilled(runner, cache_factory, prompt, n_rows=2)
    twins = [runner.forward(mx.array([[t], [t]]), context.caches)[0, -1] for t in alone[1]]
    noise = _distance(alone[0], [logits.astype(mx.float32) for logits in twins])
    return min(max(TOLERANCES[dtype], 3 * noise), MOST_TOLERANCE)


def _compare(alone: Sequence[Logits], together: Sequence[Logits]) -> Comparison:
    pairs = list(zip(alone, together, strict=True))
    steps = [pair for a, b in pairs for pair in zip(a, b, strict=True)]
    return Comparison(
        distance=max(_distance(a, b) for a, b in pairs),
        agreement=min(_agreement(a, b) for a, b in steps),
    )


def _agreement(one: mx.array, other: mx.array) -> float:
    """Common share of the likeliest tokens of two logits, 0 to 1."""
    n = min(N_LIKELY, one.size)
    likely: list[Any] = [mx.argpartition(-a, kth=n - 1)[:n].tolist() for a in (one, other)]
    return len(set(likely[0]) & set(likely[1])) / n


def _distance(one: Logits, other: Logits) -> float:
    """Largest relative difference of logits; infinite for NaN.

    Equal infinities do not differ.
    """
    ratios = []
    for a, b in zip(one, other, strict=True):
        scale = mx.where(mx.isinf(a), 0, mx.abs(a)).max()
        ratios.append(mx.where(a == b, 0, mx.abs(a - b)).max() / mx.maximum(scale, 1e-6))
    largest = float(mx.stack(ratios).max().item().real)
    return inf if isnan(largest) else largest


def _cannot(cache_factory: CacheFactory, error: Exception) -> str:
    quantized = (
        cache_factory.quantize(cache_factory.make())
        if cache_factory.quantized_start
        else cache_factory.make()
    )
    bits = {
        leaf.bits for leaf in cache_adapters.leaves(quantized) if isinstance(leaf, QuantizedKVCache)
    }
    if bits:
        return (
            f"the model cannot keep its KV in {bits.pop()} bits ({_words(error)}); "
            "set kv.bits to 16"
        )
    return f"the model breaks at its first tokens: {_words(error)}"


def _words(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"
