"""Sampling: rows of a batch with equal rules draw in one operation, each by its own random key.

Penalties are mlx-lm's, and so is top-p over a whole vocabulary. The draw is inverse transform
sampling from one uniform number per row, as `mx.random.categorical` does it, so that a seeded row
gets the same tokens alone and beside others.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_p, make_logits_processors
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.ports import ConstraintState
from mlxstack.core.request import SamplingParams
from mlxstack.engine.decode.mask import masked

LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-6, 1e6
"""Bounds within which a temperature divides float32 logits; below them sampling is greedy."""
N_AHEAD = 32
"""Uniform numbers that a row computes at once: few enough to cost nothing when they are unused."""


class SampledToken(Struct, frozen=True):
    """Lazily: the token (1,), its logprob (1,), the `top` tokens with logprobs, if asked for."""

    token: mx.array
    logprob: mx.array | None = None
    top: tuple[mx.array, mx.array] | None = None


class UniformStream:
    """Uniform numbers in [0, 1) from the chain of random keys that a seed begins."""

    def __init__(self, seed: int) -> None:
        self._key = mx.random.key(seed)
        self._numbers: list[float] = []

    def take(self) -> float:
        """Return the next number.

        Numbers are computed on the CPU, so that reading them does not wait for a GPU.
        """
        if not self._numbers:
            self._numbers = self._compute()
        return self._numbers.pop()

    def _compute(self) -> list[float]:
        with mx.stream(mx.cpu):
            keys = []
            for _ in range(N_AHEAD):
                self._key, key = mx.random.split(self._key)
                keys.append(key)
            draw = mx.vmap(lambda key: mx.random.uniform(shape=(1,), key=key))
            numbers: Any = draw(mx.stack(keys))[::-1, 0].tolist()
            mx.eval(self._key)
        return list(numbers)


class Sampler:
    """Chooses for one ask, step by step. `seed` is used where the ask brings none.

    `walk` rules what may be chosen. It must know the last token, so that one is read first.
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
        self._uniform = UniformStream(seed if sampling.seed is None else sampling.seed)
        self._processors = _processors(sampling)
        self._recent = mx.array(list(prompt[-sampling.window :])) if self._processors else None
        self._constraint = state
        self._last: mx.array | None = None
        self.draw_rules = _draw_rules(sampling)

    @property
    def is_guided(self) -> bool:
        """Whether choosing reads the token before."""
        return self._constraint is not None

    def uniform(self) -> float:
        """Return the number that decides the next draw, in [0, 1)."""
        return self._uniform.take()

    def adjust(self, logits: mx.array) -> mx.array | None:
        """Apply penalties and the grammar mask to logits (1, vocabulary).

        None when this row has neither. Raises what the grammar raises.
        """
        if self._constraint is None and not self._processors:
            return None
        logits = logits.astype(mx.float32)
        for process in self._processors:
            logits = process(self._recent, logits)
        if self._constraint is None:
            return logits
        if self._last is not None:
            self._constraint.advance(int(self._last.item().real))
        mask = self._constraint.mask()
        return logits if mask is None else masked(logits, mask)

    def accept(self, token: mx.array) -> None:
        """Note the chosen token (1,), which may be lazy, for the next step."""
        self._last = token
        if self._recent is not None:
            self._recent = mx.concatenate([self._recent, token])[-self._sampling.window :]


def sample_rows(choosers: Sequence[Sampler], logits: mx.array) -> list[SampledToken | Exception]:
    """Choose the next token of every row from logits (rows, vocabulary), lazily.

    Rows with equal rules are one operation. A row whose rules raise gets the exception.
    """
    results: list[SampledToken | Exception | None] = [None] * len(choosers)
    adjusted: dict[int, mx.array] = {}
    groups: dict[SamplingParams, list[int]] = {}
    for i, chooser in enumerate(choosers):
        try:
            row = chooser.adjust(logits[i : i + 1])
        except Exception as error:
            results[i] = error
            continue
        if row is not None:
            adjusted[i] = row
        groups.setdefault(chooser.draw_rules, []).append(i)
    for rules, members in groups.items():
        uniforms = [choosers[i].uniform() for i in members] if rules.temperature else []
        try:
            choices = draw(rules, _rows_of(members, logits, adjusted), uniforms)
        except Exception as error:
            for i in members:
                results[i] = error
            continue
        for i, choice in zip(members, choices, strict=True):
            choosers[i].accept(choice.token)
            results[i] = choice
    return [result for result in results if result is not None]


def draw(rules: SamplingParams, logits: mx.array, uniforms: Sequence[float]) -> list[SampledToken]:
    """Choose one token for each row of logits (rows, vocabulary) by the same rules, lazily.

    `uniforms` holds one number in [0, 1) per row; none when greedy. Log probabilities are
    float32, before temperature and filters.
    """
    n = logits.shape[0]
    n_top = rules.top_logprobs
    if not rules.temperature and n_top is None:
        return [SampledToken(token) for token in mx.split(mx.argmax(logits, axis=-1), n)]
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if rules.temperature:
        picked = _pick(rules, logprobs, mx.array(np.array(uniforms, np.float32))[:, None])
    else:
        picked = mx.argmax(logits, axis=-1)
    tokens = mx.split(picked, n)
    if n_top is None:
        return [SampledToken(token) for token in tokens]
    values = mx.split(mx.take_along_axis(logprobs, picked[:, None], axis=-1)[:, 0], n)
    if n_top == 0:
        return [SampledToken(token, value) for token, value in zip(tokens, values, strict=True)]
    best, best_values = _top(logprobs, n_top)
    order = mx.argsort(-best_values, axis=-1)
    columns = mx.split(mx.take_along_axis(best, order, axis=-1).flatten(), n)
    numbers = mx.split(mx.take_along_axis(best_values, order, axis=-1).flatten(), n)
    return [
        SampledToken(*row[:2], row[2:])
        for row in zip(tokens, values, columns, numbers, strict=True)
    ]


def _pick(rules: SamplingParams, logprobs: mx.array, uniforms: mx.array) -> mx.array:
    """Draw one token per row, (rows,): after top-k, top-p and min-p, with temperature."""
    ids = None
    if 0 < rules.top_k < logprobs.shape[-1]:
        ids, logprobs = _top(logprobs, rules.top_k)
        if 0 < rules.top_p < 1:
            logprobs = _within_top_p(logprobs, rules.top_p)
    elif 0 < rules.top_p < 1:
        logprobs = apply_top_p(logprobs, rules.top_p)
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
    """The `k` likeliest tokens of each row, by ascending id, and their log probabilities."""
    k = min(k, logprobs.shape[-1])
    ids = mx.sort(mx.argpartition(-logprobs, kth=k - 1, axis=-1)[:, :k], axis=-1)
    return ids, mx.take_along_axis(logprobs, ids, axis=-1)


def _within_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """mlx-lm's `apply_top_p` for the likeliest tokens of a row, whose mass need not be 1."""
    ordered = mx.sort(logprobs, axis=-1)
    mass_above = mx.cumsum(mx.exp(ordered), axis=-1, reverse=True, inclusive=False)
    n_dropped = (mass_above >= top_p).sum(axis=-1, keepdims=True)
    threshold = mx.take_along_axis(ordered, n_dropped, axis=-1)
    return mx.where(logprobs < threshold, -float("inf"), logprobs)


def _rows_of(members: Sequence[int], logits: mx.array, adjusted: dict[int, mx.array]) -> mx.array:
    """The logits of these rows, (members, vocabulary), after their own adjustments."""
    if not any(i in adjusted for i in members):
        return logits if len(members) == logits.shape[0] else logits[mx.array(list(members))]
    return mx.concatenate([adjusted.get(i, logits[i : i + 1]) for i in members])


def _draw_rules(s: SamplingParams) -> SamplingParams:
    """The part of `s` that decides how a token is drawn; rows in which it is equal are grouped."""
    if s.temperature == 0:
        return SamplingParams(top_logprobs=s.top_logprobs)
    return SamplingParams(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        top_logprobs=s.top_logprobs,
    )


def _bounded(temperature: float) -> float:
    return 0.0 if temperature < LEAST_TEMPERATURE else min(temperature, MOST_TEMPERATURE)


def _processors(s: SamplingParams) -> list[Any]:
    processors: list[Any] = make_logits_processors(
        logit_bias=dict(s.logit_bias) or None,
        repetition_penalty=None if s.repetition_penalty == 1 else s.repetition_penalty,
        repetition_context_size=s.window,
        presence_penalty=s.presence_penalty or None,
        presence_context_size=s.window,
        frequency_penalty=s.frequency_penalty or None,
        frequency_context_size=s.window,
    )
    return processors
