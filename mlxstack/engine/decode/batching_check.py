"""Self-check at load: batched rows get the same logits as alone.

The last row reaches past every window of the model. Its KV there is random, which costs no
prefill and is just as good: alone and together see the same.

Rounding is no fault. Matrices of other shapes are multiplied by other kernels, and in half
precision that can send a token to another expert. So a difference counts only when it is larger
than rounding explains, changes which tokens are likely, and comes back with other tokens.

The same comparison tells whether rows may bring several tokens to a pass and take the last of
them back, which speculative decoding needs.

What only makes answers faster is not checked on a machine that is too slow for it, and stays off.
"""

import logging
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf, isnan
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, QuantizedKVCache
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.errors import SetupError
from mlxstack.engine.decode.row_grouper import GroupRows, RowGroup
from mlxstack.engine.device_errors import raise_device_error
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.cache_adapters import CacheFactory, describe
from mlxstack.engine.model.runner import ModelRunner, PassStart, SlotTokens
from mlxstack.host.load_progress import LoadProgress
from mlxstack.policy.pass_layout import RowMode

log = logging.getLogger(__name__)

SELF_CHECK_S = 60.0
"""Seconds after which no further step of the check begins."""

N_STEPS = 5
ROWS = "rows decoded together"
ATTENTION_BY_ROW = "rows whose attention is computed one by one"
GROUPED_ROWS = "rows in common arrays"
DRAFTED_ROWS = "drafts of rows together"
DRAFTED_ALONE = "drafts of single rows"
PROMPTS = "prompts in one pass"

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

MAX_TOLERANCE = 0.2
MAX_WITH_AGREEMENT = 0.5
"""Beyond this no agreement of the likely tokens excuses a difference."""

N_LIKELY = 10
NOT_NUMBERS = (
    "its logits are no numbers (NaN), even of a prompt alone: the weights or a value of "
    "config.json are damaged"
)
MIN_AGREEMENT = 0.6
"""Minimum common share of the likeliest tokens, alone and batched.

0.7 was measured when an expert flips; mixed-up rows are near 0.
"""

MAX_WINDOW = 8192
MIN_SPARSE = 2048
"""Length beyond which indexed (CacheList) layers attend sparsely."""

Logits = list[mx.array]


class BatchingCheck(Struct, frozen=True):
    """Verdict on batching a model."""

    rows: RowMode
    """How rows decode together."""
    why_not: str | None
    """Why they do not, or their attention does not."""
    kv: str
    """Description of its caches."""
    can_draft: bool = False
    """Whether rows may bring several tokens to a pass, and take some of them back."""
    can_group: bool = False
    """Whether rows may have their KV in common arrays."""
    why_no_drafts: str = "its caches cannot take tokens back"
    can_share: bool = False
    """Whether prompts may be computed in one pass."""

    @property
    def is_batching(self) -> bool:
        """Whether rows decode together."""
        return self.rows is not RowMode.ALONE


class CheckSteps:
    """Steps of a self-check, reported; none begins after `budget_s` seconds."""

    def __init__(
        self, progress: LoadProgress, budget_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._progress = progress
        self._clock = clock
        self._budget_s = budget_s
        self._began_at = clock()
        self._n_begun = 0
        self.left_out: list[str] = []

    def begins(self, step: str) -> bool:
        """Whether there is time for a step."""
        self._n_begun += 1
        if self._clock() - self._began_at > self._budget_s:
            self.left_out.append(step)
            return False
        self._progress.report(f"self-check {self._n_begun} of {N_STEPS}: {step}")
        return True

    def log_left_out(self) -> None:
        """Log what stays off because there was no time to check it."""
        if self.left_out:
            log.warning(
                "the self-check of the model took more than %g s, so that %s stay off; start it "
                "again on a machine with less to do to have them",
                self._budget_s,
                " and ".join(self.left_out),
            )


class Comparison(Struct, frozen=True):
    """Comparison of logits."""

    distance: float
    """Largest difference, relative to the size of the logits."""
    agreement: float
    """Smallest common share of the likeliest tokens."""
    allowed: float
    """Difference that rounding explains."""
    is_half: bool
    """Whether rounding may flip an expert, too: the precision is half."""

    @property
    def is_same(self) -> bool:
        """Whether rounding explains it. In float32 nothing but the distance counts."""
        if self.distance <= self.allowed:
            return True
        is_small = self.distance <= MAX_WITH_AGREEMENT
        return self.is_half and is_small and self.agreement >= MIN_AGREEMENT


class CheckTrial:
    """Prompts of different length, decoded alone, for comparison with other passes."""

    def __init__(
        self, runner: ModelRunner, cache_factory: CacheFactory, prompts: list[list[int]]
    ) -> None:
        self._runner = runner
        self._cache_factory = cache_factory
        self._prompts = prompts
        self._dtype = precision(runner.model)
        self.logits: list[Logits] = []
        """Logits of each row after the tokens in `fed`."""
        self.fed: list[list[int]] = []
        for context, prompt in zip(self.contexts(), prompts, strict=True):
            self._decode(context, prompt[-1])
        self._allowed = self._tripled_noise()

    @property
    def has_nan(self) -> bool:
        """Whether a prompt alone has logits that are NaN."""
        return any(bool(mx.isnan(step).any().item()) for row in self.logits for step in row)

    def contexts(self) -> list[SlotContext]:
        """Context of each prompt without its last token.

        The last one is lengthened, and quantized where KV is from a position on.
        """
        contexts = [self.prefilled(index) for index in range(len(self._prompts))]
        long = contexts[-1]
        n_more = _reach(long)
        for seed, leaf in enumerate(long.leaves):
            cache_adapters.extend_room(leaf, n_more, seed)
        if self._cache_factory.quantized_start:
            long.caches = self._cache_factory.quantize(long.caches)
        long.evaluate()
        return contexts

    def prefilled(self, index: int, n_rows: int = 1) -> SlotContext:
        """Context of a prompt without its last token, in equal rows."""
        context = SlotContext(self._cache_factory)
        tokens = self._prompts[index][:-1]
        self._runner.forward(mx.array([tokens] * n_rows), context.caches)
        context.tokens = tokens
        context.evaluate()
        return context

    def compare(self, together: Sequence[Logits], *repeated: Logits) -> Comparison:
        """Compare logits of all rows, and of the first one `repeated` alone."""
        expected = [*self.logits, *[self.logits[0]] * len(repeated)]
        pairs = list(zip(expected, [*together, *repeated], strict=True))
        steps = [pair for a, b in pairs for pair in zip(a, b, strict=True)]
        return Comparison(
            distance=max(_distance(a, b) for a, b in pairs),
            agreement=min(_agreement(a, b) for a, b in steps),
            allowed=self._allowed,
            is_half=self._dtype != mx.float32,
        )

    def _decode(self, context: SlotContext, token: int) -> None:
        self.logits.append([])
        self.fed.append([])
        for _ in range(STEPS):
            self.fed[-1].append(token)
            self.logits[-1] += _execute(self._runner, [context], [[token]])[0]
            token = int(mx.argmax(self.logits[-1][-1]).item().real)

    def _tripled_noise(self) -> float:
        """Tripled difference of a plain batch of equal rows.

        At least the tolerance of the precision: two rows round less than three, and need not flip.
        """
        caches = self.prefilled(1, n_rows=2).caches
        twins = [self._runner.forward(mx.array([[t], [t]]), caches)[0, -1] for t in self.fed[1]]
        noise = _distance(self.logits[1], [logits.astype(mx.float32) for logits in twins])
        return min(max(TOLERANCES[self._dtype], 3 * noise), MAX_TOLERANCE)


def self_check(
    model: Any,
    cache_factory: CacheFactory,
    n_vocab: int,
    steps: CheckSteps | None = None,
    group_rows: GroupRows | None = None,
) -> BatchingCheck:
    """Decode prompts of different length alone and together, and compare the logits.

    Raises SetupError when the model cannot even run alone, such as with a KV precision that its
    code does not know.
    """
    steps = steps or CheckSteps(LoadProgress(), inf)
    check = _checked_rows(model, cache_factory, n_vocab, steps, group_rows)
    check = _with_drafts(check, model, cache_factory, n_vocab, steps)
    if check.rows is RowMode.RAGGED and steps.begins(PROMPTS):
        check = replace(check, can_share=_can_share(ModelRunner(model), cache_factory, n_vocab))
    steps.log_left_out()
    return check


def _checked_rows(
    model: Any,
    cache_factory: CacheFactory,
    n_vocab: int,
    steps: CheckSteps,
    group_rows: GroupRows | None,
) -> BatchingCheck:
    """Verdict on rows together, and on groups of them."""
    steps.begins(ROWS)
    runner = ModelRunner(model, rows=RowMode.SINGLE)
    compared = _compared_rows(runner, cache_factory, n_vocab)
    trial = compared.trial
    if compared.why_not is None:
        can_group = (
            group_rows is not None
            and steps.begins(GROUPED_ROWS)
            and _can_group(runner, trial, group_rows)
        )
        return BatchingCheck(runner.rows, None, compared.kv, can_group=can_group)
    if not trial.has_nan and steps.begins(ATTENTION_BY_ROW):
        runner = ModelRunner(model, rows=RowMode.ATTENTION_BY_ROW)
        if _compared_rows(runner, cache_factory, n_vocab).why_not is None:
            return BatchingCheck(runner.rows, compared.why_not, compared.kv)
    return BatchingCheck(RowMode.ALONE, compared.why_not, compared.kv)


class ComparedRows(Struct, frozen=True):
    """Rows that were decoded together and alone."""

    trial: CheckTrial
    """The last trial."""
    kv: str
    """Description of its caches."""
    why_not: str | None
    """Why they do not decode together; None where they do."""


def _compared_rows(runner: ModelRunner, cache_factory: CacheFactory, n_vocab: int) -> ComparedRows:
    distances: list[float] = []
    for number in range(N_TRIALS):
        try:
            trial = CheckTrial(runner, cache_factory, _prompts(n_vocab, number, 7, 101))
        except Exception as error:
            raise_device_error(error)
            raise SetupError(_cannot(cache_factory, error)) from error
        contexts = trial.contexts()
        kv = describe(contexts[0].caches)
        try:
            together = _together(runner, contexts, trial.fed)
        except Exception as error:
            raise_device_error(error)
            return ComparedRows(trial, kv, f"the row view cannot serve it: {_message(error)}")
        compared = trial.compare(together)
        if compared.is_same:
            return ComparedRows(trial, kv, None)
        distances.append(compared.distance)
    if trial.has_nan:
        return ComparedRows(trial, kv, NOT_NUMBERS)
    least = min(distances)
    reason = f"in a batch its logits differ from alone by {least:.3g} or more in {N_TRIALS} trials"
    return ComparedRows(trial, kv, reason)


def _with_drafts(
    check: BatchingCheck, model: Any, cache_factory: CacheFactory, n_vocab: int, steps: CheckSteps
) -> BatchingCheck:
    """Add the verdict on several tokens per row, batched or alone."""
    modes = {DRAFTED_ROWS: RowMode.RAGGED, DRAFTED_ALONE: check.rows}
    for step, rows in modes.items():
        if step == DRAFTED_ROWS and check.rows is not RowMode.SINGLE:
            continue
        if not steps.begins(step):
            return replace(check, why_no_drafts="there was no time to check them at the start")
        if _can_draft(ModelRunner(model, rows=rows), cache_factory, n_vocab):
            return replace(check, can_draft=True, rows=rows)
    return check


def _can_group(runner: ModelRunner, trial: CheckTrial, group_rows: GroupRows) -> bool:
    """Whether rows can be grouped, and get the same logits then."""
    contexts = trial.contexts()
    group = group_rows(contexts)
    if group is None:
        return False
    try:
        together = _together(runner, contexts, trial.fed, group)
    except Exception as error:
        # A model may use keys outside of the attention function in ways of its own.
        raise_device_error(error)
        return False
    return trial.compare(together).is_same


def _can_draft(runner: ModelRunner, cache_factory: CacheFactory, n_vocab: int) -> bool:
    """Whether logits are the same with drafts, some rolled back.

    A slot without others brings its draft as a sequence.
    """
    if not all(map(cache_adapters.can_roll_back, cache_adapters.leaves(cache_factory.make()))):
        return False
    for number in range(N_TRIALS):
        trial = CheckTrial(runner, cache_factory, _prompts(n_vocab, number, 5, 89))
        contexts = trial.contexts()
        single = trial.prefilled(0)
        try:
            drafted = _drafted(runner, contexts, trial.fed, n_vocab)
            sequence = _execute(runner, [single], [trial.fed[0]])
        except Exception as error:
            raise_device_error(error)
            return False
        if trial.compare(drafted, *sequence).is_same:
            return True
    return False


def _can_share(runner: ModelRunner, cache_factory: CacheFactory, n_vocab: int) -> bool:
    """Whether chunks of prompts have the same logits in one pass."""
    for number in range(N_TRIALS):
        trial = CheckTrial(runner, cache_factory, _prompts(n_vocab, number, 5, 89))
        try:
            shared = _execute(runner, trial.contexts(), trial.fed, n_prefill=STEPS)
        except Exception as error:
            raise_device_error(error)
            return False
        if trial.compare(shared).is_same:
            return True
    return False


def _prompts(n_vocab: int, number: int, by_token: int, by_trial: int) -> list[list[int]]:
    """Prompts of a trial, each different."""
    return [
        [(by_token * i + 3 * n + by_trial * number) % n_vocab for i in range(n)] for n in LENGTHS
    ]


def _drafted(
    runner: ModelRunner, contexts: Sequence[SlotContext], fed: Sequence[list[int]], n_vocab: int
) -> list[Logits]:
    """Logits of three passes; row i keeps i + 1 tokens of the first.

    The others bring rows of different length: their padding must leave no trace in the states.
    """
    wrong = [
        [*tokens[: i + 1], *((t + 1) % n_vocab for t in tokens[i + 1 :])]
        for i, tokens in enumerate(fed)
    ]
    starts = [PassStart.of(context.caches, STEPS) for context in contexts]
    first = _execute(runner, contexts, wrong)
    left = [start.roll_back(i + 1) for i, start in enumerate(starts)]
    remaining = [tokens[n:] for tokens, n in zip(fed, left, strict=True)]
    again: list[Logits] = [[] for _ in remaining]
    for begins in (True, False):
        pieces = [t[: i + 1] if begins else t[i + 1 :] for i, t in enumerate(remaining)]
        rows = [i for i, tokens in enumerate(pieces) if tokens]
        outputs = _execute(runner, [contexts[i] for i in rows], [pieces[i] for i in rows])
        for i, logits in zip(rows, outputs, strict=True):
            again[i] += logits
    return [
        [*logits[: i + 1], *again[i][i + 1 - n :]]
        for i, (logits, n) in enumerate(zip(first, left, strict=True))
    ]


def _execute(
    runner: ModelRunner,
    contexts: Sequence[SlotContext],
    tokens: Sequence[list[int]],
    views: Sequence[Any] | None = None,
    n_prefill: int = 0,
) -> list[Logits]:
    """Logits of every row's tokens, computed in one pass."""
    plan = [
        SlotTokens(context.own_caches, mx.array(row), n_prefill=n_prefill)
        for context, row in zip(contexts, tokens, strict=True)
    ]
    logits = runner.execute(plan, views)
    logits = logits.astype(mx.float32)
    mx.eval(logits)
    ends = [*accumulate(map(len, tokens))]
    return [list(logits[end - len(row) : end]) for end, row in zip(ends, tokens, strict=True)]


def precision(model: Any) -> mx.Dtype:
    """Coarsest floating-point type of the weights, which bounds the rounding."""
    types = {array.dtype for _, array in tree_flatten(model.parameters())}
    halves = [dtype for dtype in (mx.bfloat16, mx.float16) if dtype in types]
    return next(iter(halves), mx.float32)


def _reach(context: SlotContext) -> int:
    """Tokens beyond every window, in the sparse range of sparse layers."""
    windows = [cache_adapters.window_of(leaf) for leaf in context.leaves]
    lists = [
        len(list(cache_adapters.leaves([c]))) for c in context.caches if isinstance(c, CacheList)
    ]
    n_tokens = max([*windows, 0])
    if max(lists, default=0) > 1:
        n_tokens = max(n_tokens, MIN_SPARSE)
    return min(n_tokens, MAX_WINDOW) + LENGTHS[0]


def _together(
    runner: ModelRunner,
    contexts: Sequence[SlotContext],
    fed: Sequence[list[int]],
    group: RowGroup | None = None,
) -> list[Logits]:
    outputs: list[Logits] = [[] for _ in fed]
    for step in range(STEPS):
        views = group.views() if group is not None else None
        rows = _execute(runner, contexts, [[tokens[step]] for tokens in fed], views)
        for output, logits in zip(outputs, rows, strict=True):
            output.extend(logits)
    return outputs


def _agreement(alone: mx.array, batched: mx.array) -> float:
    """Common share of the likeliest tokens of two logits, 0 to 1."""
    n = min(N_LIKELY, alone.size)
    likely: list[Any] = [mx.argpartition(-a, kth=n - 1)[:n].tolist() for a in (alone, batched)]
    return len(set(likely[0]) & set(likely[1])) / n


def _distance(alone: Logits, batched: Logits) -> float:
    """Largest relative difference of logits; infinite for NaN.

    Equal infinities do not differ.
    """
    ratios = []
    for a, b in zip(alone, batched, strict=True):
        scale = mx.where(mx.isinf(a), 0, mx.abs(a)).max()
        ratios.append(mx.where(a == b, 0, mx.abs(a - b)).max() / mx.maximum(scale, 1e-6))
    largest = float(mx.stack(ratios).max().item().real)
    return inf if isnan(largest) else largest


def _cannot(cache_factory: CacheFactory, error: Exception) -> str:
    leaves = cache_adapters.leaves(cache_factory.make(cache_factory.quantized_start))
    bits = {leaf.bits for leaf in leaves if isinstance(leaf, QuantizedKVCache)}
    if bits:
        return (
            f"the model cannot keep its KV in {bits.pop()} bits ({_message(error)}); "
            "set kv.bits to 16"
        )
    return f"the model breaks at its first tokens: {_message(error)}"


def _message(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"
