"""Decides on early turns of an agent by use of earlier ones."""

from math import inf

from msgspec import Struct

MIN_TOKENS = 32
"""Fewer tokens are not worth a change of the context."""

MAX_WASTED = 2
"""Wasted early turns in a row before an hourly limit of one."""

MAX_TOKENS = 200_000
"""Tokens of early turns per agent and hour, used ones included."""

MIN_USED = 0.5
"""Minimum used share of an early turn's tokens; below it is wasted."""

HOUR_S = 3600.0


class EarlyHistory(Struct, frozen=True):
    """Early turns of an agent: `n_tokens` since `began`, `n_wasted` in a row.

    A client has one too.
    """

    began: float = -inf
    n_tokens: int = 0
    n_wasted: int = 0


def first_history(client: EarlyHistory) -> EarlyHistory:
    """History of a new agent, taken from its client's other agents."""
    return EarlyHistory(client.began, 0, client.n_wasted)


def may_begin(history: EarlyHistory, n_tokens: int, now: float) -> bool:
    """Whether to compute `n_tokens` of the expected next prompt."""
    if n_tokens < MIN_TOKENS:
        return False
    if now - history.began >= HOUR_S:
        return n_tokens <= MAX_TOKENS
    return history.n_wasted < MAX_WASTED and history.n_tokens + n_tokens <= MAX_TOKENS


def note_begun(history: EarlyHistory, n_tokens: int, now: float) -> EarlyHistory:
    """Count computed tokens."""
    if now - history.began >= HOUR_S:
        return EarlyHistory(now, n_tokens, history.n_wasted)
    return EarlyHistory(history.began, history.n_tokens + n_tokens, history.n_wasted)


def note_used(history: EarlyHistory, n_begun: int, n_used: int) -> EarlyHistory:
    """Learn how many of the tokens the next prompt used."""
    n_wasted = 0
    if n_used < MIN_USED * n_begun:
        n_wasted = history.n_wasted + 1
    return EarlyHistory(history.began, history.n_tokens, n_wasted)
