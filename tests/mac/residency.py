"""A model of Metal's residency sets, which hold wired buffers.

MLX adds a new buffer to a set while the wired bytes stay within the limit, and removes it when it
is freed; each is a change of the sets (`resident.cpp` and `allocator.cpp` of MLX).
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

WATCHED = ("eval", "async_eval", "synchronize", "clear_cache", "clear_streams")


class Residency:
    """Wired bytes as Metal would hold them, compared at each call of MLX that computes or frees."""

    def __init__(self) -> None:
        self.limit = 0
        self.limits: list[int] = []
        self.n_changes = 0
        self._wired = 0

    def watch(self, patch: pytest.MonkeyPatch, working_set: int) -> None:
        """Metal with this working set; only the limits are not real."""
        facts = {"device_name": "M", "max_recommended_working_set_size": working_set}
        patch.setattr(mx, "device_info", lambda *_: facts)
        patch.setattr(mx.metal, "is_available", lambda: True)
        patch.setattr(mx, "set_wired_limit", self._set_limit)
        for name in ("set_memory_limit", "set_cache_limit"):
            patch.setattr(mx, name, lambda _: 0)
        for name in WATCHED:
            patch.setattr(mx, name, self._watched(getattr(mx, name)))

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            done = call(*args)
            self._compare()
            return done

        return watched

    def _compare(self) -> None:
        """Count a change of the sets by arrays that were created or freed."""
        wired = min(self.limit, int(mx.get_active_memory()))
        self.n_changes += wired != self._wired
        self._wired = wired

    def _set_limit(self, n_bytes: int) -> int:
        self._compare()
        before = self.limit
        self.limit = n_bytes
        self.limits.append(n_bytes)
        self._wired = min(n_bytes, int(mx.get_active_memory()))
        return before
