"""Packs a long context piece by piece: nobody who decodes waits for all of it."""

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
    """What `Shelving.shelve` would pack at once, so many pieces of it as the context has.

    Memory that is full may lose a piece as soon as it is packed; then the rest is left to
    `shelve`, instead of being packed for ever.
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
    """`post` runs a function on the MLX thread between two turns; `is_decoding` tells whether
    somebody would wait for it."""

    def __init__(self, post: CallSoon, is_decoding: Callable[[], bool]) -> None:
        self._post = post
        self._is_decoding = is_decoding

    def run(self, step: Callable[[], bool], end: End) -> None:
        """Take steps until one says False, then call `end`; at once with what a step raises."""
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
        """Go on in the first turn after `due`, or in the next one when nobody decodes."""

        def wake() -> None:
            if self._is_decoding() and time.perf_counter() < due:
                self._rest(due, go_on)
            else:
                go_on()

        self._post(wake)
