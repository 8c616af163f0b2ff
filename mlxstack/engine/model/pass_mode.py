"""Mode of a forward pass: how its layers multiply and attend."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import mlx.core as mx


class PassMode(Protocol):
    """Rules of a pass beside the model's own."""

    @property
    def max_rows(self) -> int:
        """Tokens that are decoded in one pass at most; 0: any number."""
        ...

    def attend(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Attention (B, heads, n, dim) of a layer; None: the usual one."""
        ...


class CurrentMode(threading.local):
    """Mode of the pass that this thread builds."""

    mode: PassMode | None = None


_current = CurrentMode()


def current_mode() -> PassMode | None:
    """Mode of the pass that is being built; None: the usual one."""
    return _current.mode


@contextmanager
def using_mode(mode: PassMode | None) -> Iterator[None]:
    """Build the graphs of passes in this mode."""
    before = _current.mode
    _current.mode = mode
    try:
        yield
    finally:
        _current.mode = before
