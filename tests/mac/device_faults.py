"""A device that fails: calls of MLX raise what it raises after a failed command buffer."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx

TIMEOUT = (
    "[METAL] Command buffer execution failed: Caused GPU Timeout Error "
    "(00000002:kIOGPUCommandBufferCallbackErrorTimeout)."
)
INTERACTIVITY = (
    "[METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)."
)
OUT_OF_MEMORY = (
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)."
)
DENIED = (
    "[METAL] Command buffer execution failed: Ignored (for causing prior/excessive GPU errors) "
    "(00000004:kIOGPUCommandBufferCallbackErrorSubmissionsIgnored)."
)
FOR_EVER = 10**9
WAITING = ("eval", "async_eval", "synchronize")
"""Calls of MLX that encode or wait, and so raise the error of a command buffer."""


class DeviceFaults:
    """Counts the calls that encode or wait; some of them raise once `fail` was called."""

    def __init__(self, put: Callable[[Any, str, Any], None] = setattr) -> None:
        self.n_raised = 0
        self._n_before = FOR_EVER
        self._n_left = 0
        self._text = TIMEOUT
        for name in WAITING:
            put(mx, name, self._failing(getattr(mx, name)))

    def fail(self, n_times: int = 1, *, after: int = 0, text: str = TIMEOUT) -> None:
        """Let `after` calls pass, then raise in the next `n_times` ones."""
        self._text = text
        self._n_left = n_times
        self._n_before = after

    def _failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*args: Any) -> Any:
            self._n_before -= 1
            if self._n_before < 0 < self._n_left:
                self._n_left -= 1
                self.n_raised += 1
                raise RuntimeError(self._text)
            return call(*args)

        return failing
