"""Rules that may end an answer before its model does."""

from collections.abc import Callable
from typing import Protocol

from mlxstack.core.loops import LoopStop
from mlxstack.core.request import Request
from mlxstack.engine.decode.sampler import Sampler


class AnswerRule(Protocol):
    """Rule of one answer. MLX thread only."""

    stops: list[LoopStop]
    """Thoughts and answers that it has ended so far."""

    def observe(self, token: int) -> bool:
        """Whether the answer ends here; a thought may be closed instead."""


AnswerRules = Callable[[Request, Sampler], AnswerRule | None]
"""Makes the rule of a request, None for none."""


def no_rule(_request: Request, _sampler: Sampler) -> None:
    """Let every answer go on."""
