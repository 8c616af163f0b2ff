"""Incremental packing of long contexts, so that decoding never waits for all of it."""

import time
from collections.abc import Callable

from mlxstack.core.ports import CallSoon
from mlxstack.engine.kv.park import ContextParker
from mlxstack.engine.kv.segments import pieces
from mlxstack.engine.kv.slot_context import SlotContext

REST = 2.0
"""Beside a decoding slot each piece is followed by so many times its own time of rest."""

End = Callable[[Exception | None], None]


class IncrementalPack:
    """Packs a context for `ContextParker.index_context`, one piece per step.

    Full memory may evict a piece as soon as it is packed; then `index_context` packs the rest, so
    that packing always ends.
    """

    def __init__(self, context: SlotContext, parker: ContextParker) -> None:
        self._context = context
        self._version = context.version
        self._parker = parker
        self._n_left = len(pieces(0, len(context)))

    @property
    def is_current(self) -> bool:
        """Whether the context is still as it was."""
        return self._context.version == self._version

    def go_on(self) -> bool:
        """Pack a piece; False when at most one is left, or the context has changed."""
        if self._n_left == 0 or not self.is_current:
            return False
        self._n_left -= 1
        return self._parker.index_next(self._context, time.monotonic())


class BackgroundSteps:
    """Runs long work in steps; `post` runs a function on the MLX thread between two steps.

    While `is_decoding`, pauses between the steps bound the delay of tokens.
    """

    def __init__(self, post: CallSoon, is_decoding: Callable[[], bool]) -> None:
        self._post = post
        self._is_decoding = is_decoding

    def run(self, step: Callable[[], bool], end: End) -> None:
        """Take steps until one returns False, then call `end` with None or the error."""
        began = time.perf_counter()
        try:
            is_more = step()
        except Exception as error:
            end(error)
            return
        if not is_more:
            end(None)
            return
        now = time.perf_counter()
        self._rest(now + REST * (now - began), lambda: self.run(step, end))

    def _rest(self, due: float, go_on: Callable[[], None]) -> None:
        """Continue in the first step after `due`, or in the next one while no slot decodes."""

        def wake() -> None:
            if self._is_decoding() and time.perf_counter() < due:
                self._rest(due, go_on)
            else:
                go_on()

        self._post(wake)
