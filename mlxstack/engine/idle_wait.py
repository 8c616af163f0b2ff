"""Idle wait: keep-warm passes, and a check of the index.

A keep-warm pass computes one token on caches of its own, so that a GPU uses all weights. It reads
no KV, samples nothing and stores nothing. Of an engine on several machines a pass would wait for
the others: there is none.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

import mlx.core as mx

from mlxstack.core.preset import Preset
from mlxstack.engine.device import has_gpu
from mlxstack.engine.loop import EngineLoop
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.host.spare_power import has_calm_mains
from mlxstack.policy.keep_warm import IdleState, seconds_to_pass

log = logging.getLogger(__name__)

QUIET_S = 2.0
"""Idle seconds without messages until the prefix index is checked."""

Message = Callable[[], None]


class IdleWait:
    """Waits for messages while there is nothing to do. MLX thread only.

    `compute` makes a keep-warm pass, until `keep_warm_s` seconds after the last request; 0: never.
    `is_powered` must be short: a request may wait for it. `publish` updates the snapshot.
    """

    def __init__(
        self,
        loop: EngineLoop,
        compute: Callable[[], None],
        keep_warm_s: float,
        publish: Callable[[], None],
        *,
        is_powered: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._compute = compute
        self._keep_warm_s = keep_warm_s
        self._publish = publish
        self._is_powered = is_powered
        self._clock = clock
        self._n_requests = 0
        self._answered_at: float | None = None
        self._passed_at: float | None = None
        self._has_buffers = False
        """Whether passes have left freed buffers behind."""

    def next_message(self, inbox: "SimpleQueue[Message]") -> Message:
        """Wait for a message, and work meanwhile."""
        n_requests = self._loop.stats.counters.n_requests
        if n_requests != self._n_requests:
            self._n_requests = n_requests
            self._answered_at = self._clock()
        check_at: float | None = self._clock() + QUIET_S
        while True:
            wait_s = self._keep_warm(is_asked=not inbox.empty())
            if check_at is not None:
                check_in_s = max(0.0, check_at - self._clock())
                wait_s = check_in_s if wait_s is None else min(wait_s, check_in_s)
            with suppress(Empty):
                return inbox.get(timeout=wait_s)
            if check_at is not None and self._clock() >= check_at:
                check_at = None
                self._check_index()

    def _keep_warm(self, *, is_asked: bool) -> float | None:
        """Make a due pass; seconds until the next one, or None."""
        if not self._keep_warm_s:
            return None
        wait_s = self._seconds_to_pass(is_asked=is_asked)
        if wait_s == 0:
            self._make_pass()
            wait_s = self._seconds_to_pass(is_asked=False)
        if wait_s is None and self._has_buffers and not is_asked:
            self._has_buffers = False
            self._loop.release_buffers()
        return wait_s

    def _seconds_to_pass(self, *, is_asked: bool) -> float | None:
        loop = self._loop
        is_busy = is_asked or loop.is_busy or loop.is_holding
        state = IdleState(
            now=self._clock(),
            answered_at=self._answered_at,
            passed_at=self._passed_at,
            is_busy=is_busy,
            is_powered=not is_busy and self._is_powered(),
        )
        return seconds_to_pass(state, self._keep_warm_s)

    def _make_pass(self) -> None:
        """Keep the weights warm.

        After an error only the next request resumes it.

        Nothing else was in flight: an error is that of the pass, which has written no KV.
        """
        self._has_buffers = True
        try:
            self._compute()
        except Exception:
            log.exception("a keep-warm pass failed; the next request resumes them")
            self._answered_at = None
            return
        self._passed_at = self._clock()
        self._loop.stats.count(n_warm_passes=1)
        self._publish()

    def _check_index(self) -> None:
        """Log an inconsistent prefix index; serving continues."""
        try:
            self._loop.slot_kv.prefix_cache.check()
        except (AssertionError, KeyError) as broken:
            log.error("prefix index is inconsistent: %s; please report this bug", broken)


def idle_wait(
    loop: EngineLoop, preset: Preset, publish: Callable[[], None], *, is_alone: bool
) -> IdleWait:
    """Idle work of an engine, whose passes run here if `is_alone`."""
    model = loop.batch.runner.model
    runner = ModelRunner(model)
    factory = CacheFactory(model, preset.kv)

    def compute() -> None:
        mx.eval(runner.execute([SlotTokens(factory.make(), runner.example(1))]))

    keep_warm_s = preset.device.keep_warm_s if has_gpu() and is_alone else 0.0
    return IdleWait(loop, compute, keep_warm_s, publish, is_powered=has_calm_mains)
