"""How one row of the batch chooses its next token: its own rules, its own random key.

Filters and penalties are mlx-lm's; only the draw is ours, because mlx-lm draws from one global
random state, which would tie a seeded request to whoever runs beside it.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    make_logits_processors,
)
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.ask import Sampling
from mlxstack.core.ports import Walk
from mlxstack.engine.mask import masked

LEAST_TEMPERATURE, MOST_TEMPERATURE = 1e-6, 1e6
"""Bounds within which a temperature divides float32 logits; below them sampling is greedy."""


class Choice(Struct, frozen=True):
    """Lazily: the token (1,), its logprob (1,), the `top` tokens with logprobs, if asked for."""

    token: mx.array
    logprob: mx.array | None = None
    top: tuple[mx.array, mx.array] | None = None


class Chooser:
    """Chooses for one ask, step by step. `seed` is used where the ask brings none.

    `walk` rules what may be chosen. It must know the last token, so that one is read first.
    """

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int], seed: int, walk: Walk | None = None
    ) -> None:
        self._sampling = replace(sampling, temperature=_bounded(sampling.temperature))
        self._key = mx.random.key(sampling.seed if sampling.seed is not None else seed)
        self._processors = _processors(sampling)
        self._recent = mx.array(list(prompt[-sampling.window :])) if self._processors else None
        self._walk = walk
        self._last: mx.array | None = None

    @property
    def is_guided(self) -> bool:
        """Whether choosing reads the token before."""
        return self._walk is not None

    @property
    def is_plain(self) -> bool:
        """Greedy, nothing added, nothing reported: the whole batch can do it at once."""
        s = self._sampling
        is_free = not self._processors and self._walk is None
        return s.temperature == 0 and is_free and s.top_logprobs is None

    def choose(self, logits: mx.array) -> Choice:
        """The next token from logits (1, vocabulary), which are not evaluated."""
        for process in self._processors:
            logits = process(self._recent, logits)
        logits = self._allowed(logits)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        token = self._draw(logprobs)
        self._last = token
        if self._recent is not None:
            self._recent = mx.concatenate([self._recent, token])[-self._sampling.window :]
        return self._report(token, logprobs)

    def _allowed(self, logits: mx.array) -> mx.array:
        if self._walk is None:
            return logits
        if self._last is not None:
            self._walk.take(int(self._last.item().real))
        mask = self._walk.mask()
        return logits if mask is None else masked(logits, mask)

    def _draw(self, logprobs: mx.array) -> mx.array:
        s = self._sampling
        if s.temperature == 0:
            return mx.argmax(logprobs, axis=-1)
        if 0 < s.top_p < 1:
            logprobs = apply_top_p(logprobs, s.top_p)
        if s.min_p > 0:
            logprobs = apply_min_p(logprobs, s.min_p)
        if 0 < s.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, s.top_k)
        self._key, key = mx.random.split(self._key)
        return mx.random.categorical(logprobs * (1 / s.temperature), key=key)

    def _report(self, token: mx.array, logprobs: mx.array) -> Choice:
        n_top = self._sampling.top_logprobs
        if n_top is None:
            return Choice(token)
        logprob = mx.take_along_axis(logprobs, token[:, None], axis=-1)[0]
        if n_top == 0:
            return Choice(token, logprob)
        best = mx.argsort(-logprobs, axis=-1)[0, :n_top]
        return Choice(token, logprob, (best, logprobs[0, best]))


def _bounded(temperature: float) -> float:
    return 0.0 if temperature < LEAST_TEMPERATURE else min(temperature, MOST_TEMPERATURE)


def _processors(s: Sampling) -> list[Any]:
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
