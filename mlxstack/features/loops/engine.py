"""Ends answers that repeat themselves, and closes such thoughts."""

from mlxstack.core.loops import LoopStop
from mlxstack.core.request import Request
from mlxstack.engine.decode.sampler import Sampler
from mlxstack.features.loops.policy import Repetition, RepetitionRule, TokenText

GROWTH = 64
"""Tokens until a repetition that is a copy is looked at again."""


def loop_rule(request: Request, sampler: Sampler) -> "LoopRule | None":
    """Rule of a request; None where its answer may repeat."""
    return LoopRule(request, sampler) if request.stop_loops else None


class LoopRule:
    """Rule of one answer: no part of it repeats for too long.

    Copies of the prompt or of the expected answer may, and what a grammar forces. MLX thread only.
    """

    def __init__(self, request: Request, sampler: Sampler) -> None:
        self.stops: list[LoopStop] = []
        self._request = request
        self._sampler = sampler
        self._copied = (TokenText(request.tokens), TokenText(request.prediction))
        self._repetition = RepetitionRule()
        self._min_tokens = 0
        """Tokens of the answer before the next look at a repetition."""
        self._is_closing = False

    def observe(self, token: int) -> bool:
        """Whether the answer ends with this token."""
        repetition = self._repetition.observe(token)
        if self._is_closing:
            self._close()
        if repetition is None or not repetition.is_too_long:
            return False
        n_tokens = len(self._repetition.tokens)
        if n_tokens < self._min_tokens:
            return False
        if self._is_copy(repetition):
            self._min_tokens = n_tokens + GROWTH
            return False
        if self._sampler.forced_tokens():
            return False
        is_thought = self._is_thought()
        first = n_tokens - repetition.n_tokens
        self.stops.append(LoopStop(first, repetition.period, repetition.n_tokens, is_thought))
        if is_thought:
            self._repetition.restart()
            self._is_closing = True
            self._close()
        return not is_thought

    def _is_copy(self, repetition: Repetition) -> bool:
        """Whether all copies stand in the prompt or in the expected answer."""
        run = self._repetition.tokens[-repetition.n_tokens :]
        return any(text.has(run) for text in self._copied)

    def _is_thought(self) -> bool:
        """Whether the answer is at a thought, which can be closed."""
        constraint = self._request.constraint or self._request.thought_end
        if constraint is None:
            return False
        state = constraint.start()
        for token in self._repetition.tokens:
            state.advance(token)
        return state.close_thought()

    def _close(self) -> None:
        """Close the thought, once at most the last token is unobserved."""
        tokens = self._repetition.tokens
        if len(tokens) >= self._sampler.n_accepted - 1:
            self._is_closing = False
            self._sampler.close_thought(self._request.thought_end, tokens)
