"""Keep-warm passes: when an idle engine computes a token of no request.

macOS unwires weights that the GPU has not used for about a second, and lowers the clock of an idle
GPU; the first token of the next turn pays for both. https://github.com/ggml-org/llama.cpp/issues/10119
"""

from msgspec import Struct

INTERVAL_S = 0.5
"""Seconds between two passes, below the second after which weights are unwired."""


class IdleState(Struct, frozen=True):
    """Engine between two messages; times are monotonic seconds.

    The last request ended at `answered_at`, None before the first one, and the last keep-warm pass
    at `passed_at`. `is_busy` while requests, early turns or slot actions run. `is_powered`: on
    mains, with calm memory.
    """

    now: float
    answered_at: float | None = None
    passed_at: float | None = None
    is_busy: bool = False
    is_powered: bool = True


def seconds_to_pass(state: IdleState, keep_warm_s: float) -> float | None:
    """Seconds until the next pass, 0 now; None: after a request only.

    Without power the next interval decides again.
    """
    if state.is_busy or state.answered_at is None:
        return None
    used_at = max(state.answered_at, state.passed_at or state.answered_at)
    wait_s = max(0.0, used_at + INTERVAL_S - state.now)
    if not wait_s and not state.is_powered:
        wait_s = INTERVAL_S
    if state.now + wait_s >= state.answered_at + keep_warm_s:
        return None
    return wait_s
