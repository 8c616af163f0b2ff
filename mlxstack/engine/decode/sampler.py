"""Sampling; rows with equal parameters draw in one operation.

Penalties and min-p are mlx-lm's. The draw is inverse transform
sampling from one uniform number per token, as `mx.random.categorical` does it. The number depends
on the seed and on the position of the token, so that a seeded row gets the same tokens alone and
beside others, with proposed tokens and without.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, make_logits_processors
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.interfaces import Constraint, ConstraintState
from mlxstack.core.request import SamplingParams
from mlxstack.engine.device import has_gpu

MIN_TEMPERATURE = 1e-6
MAX_TEMPERATURE = 1e6
"""Bounds within which a temperature divides float32 logits; below them sampling is greedy."""
MAX_BIAS = 1e15
"""Bound of biases and penalties, with all of which float32 logits stay finite."""
N_AHEAD = 32
"""Uniform numbers that a row computes at once: few enough to cost nothing when they are unused."""
MIN_WIDE_VOCAB = 32_768
"""Tokens from which on a CPU takes less time for a sum for each bit than to sort probabilities."""
PROBABILITY_BITS = 30
"""Bits of a float32 up to 1, without those that are 0 in all of them."""


class Choice(Struct, frozen=True):
    """A token that was drawn, lazily."""

    token: mx.array
    """Its id (1,)."""
    logprob: mx.array | None = None
    """Its log probability (1,), where the request has `top_logprobs`."""
    top_tokens: mx.array | None = None
    """The likeliest tokens (n,), where more than none are asked for."""
    top_logprobs: mx.array | None = None
    """Their log probabilities (n,), descending."""

    @property
    def arrays(self) -> list[mx.array]:
        """Everything to compute."""
        arrays = (self.token, self.logprob, self.top_tokens, self.top_logprobs)
        return [array for array in arrays if array is not None]


class UniformStream:
    """Uniform numbers in [0, 1) from a seed's chain of random keys."""

    def __init__(self, seed: int) -> None:
        self._key = mx.random.key(seed)
        self._numbers: list[float] = []

    def peek(self, position: int) -> float:
        """Return the number `position` steps from the next one.

        Numbers are computed on the CPU, so that reading them does not wait for a GPU.
        """
        while position >= len(self._numbers):
            self._numbers += self._compute()
        return self._numbers[position]

    def skip(self, n: int) -> None:
        """Drop the next `n` numbers."""
        del self._numbers[:n]

    def _compute(self) -> list[float]:
        with mx.stream(mx.cpu):
            keys = []
            for _ in range(N_AHEAD):
                self._key, key = mx.random.split(self._key)
                keys.append(key)
            draw = mx.vmap(lambda key: mx.random.uniform(shape=(1,), key=key))
            numbers: Any = draw(mx.stack(keys))[:, 0].tolist()
            mx.eval(self._key)
        return list(numbers)


class Sampler:
    """Sampler of one request; `seed` where the request has none.

    `state` rules which tokens may be chosen. It must know the last token, so that one is read
    first.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        prompt: Sequence[int],
        seed: int,
        state: ConstraintState | None = None,
    ) -> None:
        sampling = replace(sampling, temperature=_bounded(sampling.temperature))
        self._sampling = sampling
        self.uniforms = UniformStream(seed if sampling.seed is None else sampling.seed)
        """Numbers that decide the draws of the next tokens."""
        self._processors = _processors(sampling)
        self._recent = mx.array(list(prompt[-sampling.window :])) if self._processors else None
        self._constraint = state
        self._positions: list[Any] = []
        """Positions of the constraint before each proposed token, and after all."""
        self._last: mx.array | None = None
        self.n_accepted = 0
        """Tokens so far, the last of which may be lazy."""
        self.draw_rules = _draw_rules(sampling)

    @property
    def is_guided(self) -> bool:
        """Whether choosing reads the token before."""
        return self._constraint is not None

    @property
    def is_ruled(self) -> bool:
        """Whether a grammar, which may force tokens, rules the next one."""
        return self._constraint is not None and self._constraint.is_ruled

    def close_thought(self, thought_end: Constraint | None, tokens: Sequence[int]) -> None:
        """Have the model end its thought.

        `thought_end` does it where the answer has no constraint. `tokens` are those of the answer,
        of which the last may be missing.
        """
        if self._constraint is None and thought_end is not None:
            self._constraint = thought_end.start()
            for token in tokens[: self.n_accepted - 1]:
                self._constraint.advance(token)
        if self._constraint is not None:
            self._constraint.close_thought()

    def forced_tokens(self) -> Sequence[int]:
        """The tokens that the grammar leaves no choice about from here on."""
        if self._constraint is None:
            return ()
        self._advance()
        return self._constraint.forced_tokens()

    def adjust(self, logits: mx.array, proposed: Sequence[int] = ()) -> list[mx.array] | None:
        """Apply penalties and grammar mask to logits (1 + proposed, vocabulary).

        Row i follows i proposed tokens. Rows after a token that the grammar forbids are left
        out. None when neither penalty nor grammar changes any. Raises what the grammar raises.
        """
        if self._constraint is None and not self._processors:
            return None
        self._advance()
        masks: list[bytes | None] = [None] * (len(proposed) + 1)
        if self._constraint is not None:
            masks = self._masks(proposed)
        if not self._processors and len(masks) > len(proposed) and not any(masks):
            return None
        rows = []
        for i, mask in enumerate(masks):
            row = logits[i : i + 1].astype(mx.float32)
            recent = self._recent_with(proposed[:i])
            for process in self._processors:
                row = process(recent, row)
            if mask is not None:
                row = masked(row, mask)
            rows.append(row)
        return rows

    def accept(self, tokens: Sequence[mx.array], n_proposed: int = 0) -> None:
        """Record the sampled tokens, (1,) each, proposed ones first.

        The last one may be lazy. `n_proposed` is the length of the proposal.
        """
        self.uniforms.skip(len(tokens))
        self.n_accepted += len(tokens)
        self._last = tokens[-1]
        if n_proposed and self._constraint is not None:
            self._constraint.rewind(self._positions[len(tokens) - 1])
            self._positions = []
        if self._recent is not None:
            self._recent = mx.concatenate([self._recent, *tokens])[-self._sampling.window :]

    def _masks(self, proposed: Sequence[int]) -> list[bytes | None]:
        """Grammar masks before each proposed token, and after the last.

        What the grammar raises beyond the next token is raised when an answer gets there.
        """
        constraint = self._constraint
        assert constraint is not None
        if not proposed:
            return [constraint.mask()]
        self._positions = [constraint.position()]
        masks = [constraint.mask()]
        for token in proposed:
            if not _is_allowed(masks[-1], token):
                break
            try:
                constraint.advance(token)
                position = constraint.position()
                masks.append(constraint.mask())
            except Exception:
                break
            self._positions.append(position)
        return masks

    def _advance(self) -> None:
        """Let the constraint know the last token."""
        if self._constraint is not None and self._last is not None:
            last = self._last
            self._last = None
            self._constraint.advance(int(last.item().real))

    def _recent_with(self, proposed: Sequence[int]) -> mx.array | None:
        if self._recent is None or not proposed:
            return self._recent
        return mx.concatenate([self._recent, mx.array(list(proposed))])[-self._sampling.window :]


class RowDraw:
    """Draw of a row from its lines of logits, `start` and following."""

    def __init__(
        self, sampler: Sampler, start: int, logits: mx.array, proposed: Sequence[int]
    ) -> None:
        self.sampler = sampler
        self.start = start
        self.n_lines = 1 + len(proposed)
        self.adjusted: list[mx.array] | None = None
        """Lines after penalties and grammar, where these change any."""
        self.choices: list[Choice] = []
        self.error: Exception | None = None
        try:
            self.adjusted = sampler.adjust(logits[start : start + self.n_lines], proposed)
        except Exception as error:
            self.error = error
        if self.adjusted is not None:
            self.n_lines = len(self.adjusted)


def sample_rows(
    samplers: Sequence[Sampler], logits: mx.array, proposals: Sequence[Sequence[int]] = ()
) -> list[tuple[Choice, ...] | Exception]:
    """Choose the next token of every row from logits (rows, vocabulary), lazily.

    A row with proposed tokens has a line of logits more for each, and gets a choice for each:
    choice i is valid if all before it equal the proposal. Its sampler must be given the accepted
    tokens. Rows with equal rules are one operation. A row whose rules raise gets the exception.
    """
    proposals = proposals or [()] * len(samplers)
    rows: list[RowDraw] = []
    groups = defaultdict[SamplingParams, list[RowDraw]](list)
    start = 0
    for sampler, proposed in zip(samplers, proposals, strict=True):
        row = RowDraw(sampler, start, logits, proposed)
        rows.append(row)
        if row.error is None:
            groups[sampler.draw_rules].append(row)
        start += 1 + len(proposed)
    for rules, group in groups.items():
        _draw_group(rules, group, logits)
    for row, proposed in zip(rows, proposals, strict=True):
        if row.choices and not proposed:
            row.sampler.accept([row.choices[0].token])
    return [tuple(row.choices) if row.error is None else row.error for row in rows]


def _draw_group(rules: SamplingParams, rows: Sequence[RowDraw], logits: mx.array) -> None:
    """Draw for rows with equal rules in one operation."""
    uniforms: list[float] = []
    if rules.temperature:
        uniforms = [row.sampler.uniforms.peek(i) for row in rows for i in range(row.n_lines)]
    try:
        choices = iter(draw(rules, _lines_of(rows, logits), uniforms))
    except Exception as error:
        for row in rows:
            row.error = error
        return
    for row in rows:
        row.choices = list(islice(choices, row.n_lines))


def _lines_of(rows: Sequence[RowDraw], logits: mx.array) -> mx.array:
    """Logits (lines, vocabulary) of these rows, after their own adjustments."""
    if any(row.adjusted is not None for row in rows):
        lines: list[mx.array] = []
        for row in rows:
            if row.adjusted is None:
                indices = range(row.start, row.start + row.n_lines)
                lines += [logits[i : i + 1] for i in indices]
            else:
                lines += row.adjusted
        return mx.concatenate(lines)
    if sum(row.n_lines for row in rows) == logits.shape[0]:
        return logits
    return logits[mx.array([row.start + i for row in rows for i in range(row.n_lines)])]


def masked(logits: mx.array, mask: bytes) -> mx.array:
    """Logits (1, vocabulary) with -inf for tokens not in `mask`."""
    n = logits.shape[-1]
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=n, bitorder="little")
    allowed = mx.array(bits.astype(np.bool_))
    return mx.where(allowed, logits, mx.array(float("-inf"), logits.dtype))


def draw(rules: SamplingParams, logits: mx.array, uniforms: Sequence[float]) -> list[Choice]:
    """Sample one token per row of logits (rows, vocabulary), lazily.

    `uniforms` holds one number in [0, 1) per row; none when greedy. Log probabilities are
    float32, before temperature and filters.
    """
    n = logits.shape[0]
    n_top = rules.top_logprobs
    if not rules.temperature and n_top is None:
        return [*map(Choice, mx.split(mx.argmax(logits, axis=-1), n))]
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if rules.temperature:
        picked = _pick(rules, logprobs, mx.array(np.array(uniforms, np.float32))[:, None])
    else:
        picked = mx.argmax(logits, axis=-1)
    tokens = mx.split(picked, n)
    if n_top is None:
        return [*map(Choice, tokens)]
    values = mx.split(mx.take_along_axis(logprobs, picked[:, None], axis=-1)[:, 0], n)
    if n_top == 0:
        return [*map(Choice, tokens, values)]
    best, best_values = _top(logprobs, n_top)
    order = mx.argsort(-best_values, axis=-1)
    top_tokens = mx.split(mx.take_along_axis(best, order, axis=-1).flatten(), n)
    top_logprobs = mx.split(mx.take_along_axis(best_values, order, axis=-1).flatten(), n)
    return [*map(Choice, tokens, values, top_tokens, top_logprobs)]


def _pick(rules: SamplingParams, logprobs: mx.array, uniforms: mx.array) -> mx.array:
    """Draw one token per row, (rows,), after filters, with temperature."""
    ids = None
    if 0 < rules.top_k < logprobs.shape[-1]:
        ids, logprobs = _top(logprobs, rules.top_k)
    if 0 < rules.top_p < 1:
        logprobs = _within_top_p(logprobs, rules.top_p)
    if rules.min_p > 0:
        logprobs = apply_min_p(logprobs, rules.min_p)
    scaled = logprobs * (1 / rules.temperature)
    weights = mx.exp(scaled - mx.max(scaled, axis=-1, keepdims=True))
    mass = mx.cumsum(weights, axis=-1)
    total = mass[:, -1:]
    # A target that rounds up to the total must not go past the last token of any weight.
    position = ((mass <= uniforms * total) & (mass < total)).sum(axis=-1, keepdims=True)
    if ids is not None:
        position = mx.take_along_axis(ids, position, axis=-1)
    return position[:, 0].astype(mx.uint32)


def _top(logprobs: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Top `k` tokens of each row by id, and their logprobs."""
    k = min(k, logprobs.shape[-1])
    ids = mx.sort(mx.argpartition(-logprobs, kth=k - 1, axis=-1)[:, :k], axis=-1)
    return ids, mx.take_along_axis(logprobs, ids, axis=-1)


def _within_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Least set of likeliest tokens with a mass of `top_p`.

    Others become -inf. Tokens as likely as the last one of the set stay, and all where the whole
    mass is less, as that of the `top_k` likeliest may be.
    """
    # A sum for each of 30 bits is 300 kernels, one after another; a sort with its sums is 20.
    is_sorted = has_gpu() or logprobs.shape[-1] < MIN_WIDE_VOCAB
    find = _least_by_sorting if is_sorted else _least_by_bits
    probabilities = mx.exp(logprobs)
    return mx.where(probabilities < find(probabilities, top_p), -float("inf"), logprobs)


def _least_by_sorting(probabilities: mx.array, top_p: float) -> mx.array:
    """Least probability (rows, 1) of the set of `_within_top_p`."""
    ordered = mx.sort(probabilities, axis=-1)
    mass_above = mx.cumsum(ordered, axis=-1, reverse=True, inclusive=False)
    n_dropped = (mass_above >= top_p).sum(axis=-1, keepdims=True)
    return mx.take_along_axis(ordered, n_dropped, axis=-1)


def _least_by_bits(probabilities: mx.array, top_p: float) -> mx.array:
    """The same, bit by bit, without a sort.

    Floats >= 0 are ordered as their bits are.
    """
    least = mx.zeros((probabilities.shape[0], 1), mx.uint32)
    for bit in reversed(range(PROBABILITY_BITS)):
        higher = least + (1 << bit)
        is_within = probabilities >= higher.view(mx.float32)
        mass = (probabilities * is_within).sum(axis=-1, keepdims=True)
        least = mx.where(mass >= top_p, higher, least)
    return least.view(mx.float32)


def _is_allowed(mask: bytes | None, token: int) -> bool:
    return mask is None or (token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1))


def _draw_rules(s: SamplingParams) -> SamplingParams:
    """Parameters that decide a draw; rows with equal ones are grouped."""
    if s.temperature == 0:
        return SamplingParams(top_logprobs=s.top_logprobs)
    return SamplingParams(s.temperature, s.top_p, s.top_k, s.min_p, top_logprobs=s.top_logprobs)


def _bounded(temperature: float) -> float:
    if temperature < MIN_TEMPERATURE:
        return 0.0
    return min(temperature, MAX_TEMPERATURE)


def _finite(penalty: float) -> float:
    return max(-MAX_BIAS, min(penalty, MAX_BIAS))


def _processors(s: SamplingParams) -> list[Any]:
    factor = _finite(s.repetition_penalty)
    processors: list[Any] = make_logits_processors(
        # A bias of minus infinity forbids its token.
        logit_bias={token: min(bias, MAX_BIAS) for token, bias in s.logit_bias} or None,
        repetition_penalty=None if factor == 1 else max(factor, 1 / MAX_BIAS),
        repetition_context_size=s.window,
        presence_penalty=_finite(s.presence_penalty),
        presence_context_size=s.window,
        frequency_penalty=_finite(s.frequency_penalty),
        frequency_context_size=s.window,
    )
    return processors
