"""Engine thread: the one that owns MLX, with inbox, futures and watchdog.

Load, inference, evaluation and saving of arrays happen on this thread and nowhere else.
"""

import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import mlx.core as mx
from msgspec import Struct

from mlxstack.core.engine_snapshot import Snapshot
from mlxstack.core.errors import Broken, Busy, DeviceError, Loading, StackError, describe_error
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.request import Request
from mlxstack.engine import device
from mlxstack.engine.device_errors import MAX_DEVICE_ERRORS, device_error, raise_device_error
from mlxstack.engine.device_memory import DeviceMemory
from mlxstack.engine.idle_wait import IdleWait
from mlxstack.engine.kv.disk_tier import DiskTier
from mlxstack.engine.kv.write_queue import copy_outcome
from mlxstack.engine.loop import Deliver, EngineLoop, Events
from mlxstack.engine.parts import EngineParts
from mlxstack.engine.slot_actions import SlotActionRunner
from mlxstack.host.load_progress import LoadProgress

log = logging.getLogger(__name__)

T = TypeVar("T")
Message = Callable[[], None]

MAX_FAILURES = 3
"""Failed steps in a row until the engine itself is broken."""
LOADING_S = 0.05
"""Seconds without messages between deadline checks while only KV loads."""
GATHER_S = 0.02
"""Seconds for which an idle engine waits for announced requests, so that they share passes."""
SUBMIT_S = 0.002
"""Seconds from the end of an announcement to its request, at most."""


class LoadedEngine(Struct, frozen=True):
    """A loaded model and all that serves it."""

    facts: ModelFacts
    tokenizer: Any
    loop: EngineLoop
    idle: IdleWait
    """Waits for messages."""
    disk_tier: DiskTier
    actions: SlotActionRunner
    reporters: tuple[Callable[[Snapshot], Snapshot], ...] = ()
    """Add to each snapshot what the loop does not have."""
    features: Mapping[type, Any] = {}
    """Objects that calls of the service need, by their class."""


class EngineThread:
    """Serves what `load` returns, on one thread.

    Public methods are thread-safe. `load` runs on the thread; it may raise SetupError.
    """

    def __init__(
        self,
        load: Callable[["EngineThread"], LoadedEngine],
        parts: EngineParts,
        device_memory: DeviceMemory,
        deliver: Deliver,
    ) -> None:
        self._load = load
        self._parts = parts
        self.device_memory = device_memory
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._loaded: LoadedEngine | None = None
        self._snapshot = Snapshot()
        self._loading: Future[ModelFacts] = Future()
        self._stopped: Future[None] = Future()
        self._open: set[Future[Any]] = set()
        self._drain_until: float | None = None
        self._stepped_at = time.monotonic()
        self._has_work = False
        self._n_device_errors = 0
        self._n_announced = 0
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="mlx", daemon=True)
        self.load_progress = LoadProgress()
        self.tokenizer: Any = None

    @property
    def loaded(self) -> LoadedEngine:
        """The loaded engine, between load and end. MLX thread only."""
        assert self._loaded is not None
        return self._loaded

    def start(self) -> Future[ModelFacts]:
        """Load the model on the MLX thread. The future raises SetupError."""
        self._parts.when_lost(self._fail_load)
        self._thread.start()
        return self._loading

    def submit(self, request: Request) -> None:
        """Admit a request; `deliver` gets its events, finished or failed last."""
        self.post(lambda: self.loaded.loop.submit(request))

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Announce a request that is submitted right after it. Event loop only."""
        self._n_announced += 1
        try:
            yield
        finally:
            self._n_announced -= 1

    def cancel(self, request_id: str) -> None:
        """Cancel a request; no-op once it is over."""
        self.post(lambda: self.loaded.loop.cancel(request_id))

    def snapshot(self) -> Snapshot:
        """The state after the last step, an immutable value."""
        return self._snapshot

    def stalled_s(self) -> float:
        """Watchdog: seconds without a finished step despite work; 0 when idle."""
        if self._has_work:
            return time.monotonic() - self._stepped_at
        return 0.0

    def is_alive(self) -> bool:
        """Whether the thread runs, and nothing that it computes with is lost."""
        return self._thread.is_alive() and not self.trouble

    @property
    def trouble(self) -> str:
        """Why the engine ended or cannot go on; empty while it serves."""
        return self._parts.lost or self._failure

    @property
    def is_stopping(self) -> bool:
        """Whether only requests that were admitted are still served."""
        return self._drain_until is not None

    def stop(self, drain_s: float) -> Future[None]:
        """Drain requests for at most `drain_s` seconds, then end the thread."""
        if self._thread.ident is None and not self._stopped.done():
            self._stopped.set_result(None)
        until = time.monotonic() + drain_s
        if self._parts.lost:
            # The thread may wait for ever for what is lost.
            gone: Future[None] = Future()
            gone.set_result(None)
            return gone

        def begin() -> None:
            self._drain_until = until
            self.loaded.loop.end_idle_work()

        self.post(begin)
        return self._stopped

    def run(self, work: Callable[[EngineLoop], T]) -> Future[T]:
        """Run `work` between two steps; publish a snapshot, then set its result."""

        def run(future: Future[T]) -> None:
            result = work(self.loaded.loop)
            self.publish()
            future.set_result(result)

        return self.begin(run)

    def wait(self, begin: Callable[[LoadedEngine], Future[T]]) -> Future[T]:
        """Outcome of what `begin` begins between two steps."""
        return self.begin(lambda future: copy_outcome(begin(self.loaded), future))

    def begin(self, work: Callable[[Future[T]], None]) -> Future[T]:
        """Begin `work` between two steps; it settles the future then or later."""
        future: Future[T] = Future()

        def begin() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                work(future)
            except Exception as error:
                future.set_exception(describe_error(error, "an operation on KV"))
                raise_device_error(error)

        self.track(future)
        self.post(begin)
        return future

    def track(self, future: Future[Any]) -> None:
        """Fail the future if the engine ends before it is settled."""
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        if self._stopped.done():
            self._fail_open()

    def _fail_load(self, error: StackError) -> None:
        """Fail a load that may wait for what is lost; no-op later."""
        with suppress(InvalidStateError):
            self._loading.set_exception(error)

    def _fail_open(self) -> None:
        """Fail all open futures of an engine that has ended."""
        for future in tuple(self._open):
            with suppress(InvalidStateError):
                future.set_exception(Loading("the model is being unloaded; try again soon"))

    def post(self, message: Message) -> None:
        """Handle a message on the MLX thread, between two steps."""
        if not self._has_work:
            self._stepped_at = time.monotonic()
            self._has_work = True
        self._inbox.put(message)

    def _run(self) -> None:
        try:
            self._load_and_serve()
        finally:
            self._unload()
            self._parts.end()
            # Without this MLX aborts the process at exit: its stream threads are still running.
            mx.clear_streams()
            self._stopped.set_result(None)
            self._fail_open()

    def _unload(self) -> None:
        """Drop all references to arrays."""
        # A step may be in flight whose requests were all cancelled; this waits for it.
        self.device_memory.restore()
        self._loaded = None
        self._inbox = queue.SimpleQueue()
        gc.collect()
        device.settle()

    def _load_and_serve(self) -> None:
        try:
            engine = self._loaded = self._load(self)
        except Exception as error:
            device.clear_traceback_frames(error)
            with suppress(InvalidStateError):
                self._loading.set_exception(device_error(error) or error)
            return
        self.tokenizer = engine.tokenizer
        self.publish()
        with suppress(InvalidStateError):
            self._loading.set_result(engine.facts)
        try:
            self._serve(engine)
            if not self.trouble:
                engine.loop.slot_kv.park_all()
        finally:
            engine.disk_tier.close()

    def _serve(self, engine: LoadedEngine) -> None:
        loop = engine.loop
        n_failures = 0
        while not (self.trouble or self._is_done(loop)):
            n_generated = loop.stats.counters.n_generated_tokens
            try:
                self._handle_messages(engine)
                loop.step(self._publish_events)
                for call in self._parts.after_step:
                    call()
                n_failures = 0
                self._check_device(loop, n_generated)
                if 0 < self.device_memory.planned_bytes < mx.get_active_memory():
                    self.device_memory.log_excess()
            except DeviceError as error:
                self._lose_kv(loop, error)
            except Exception as error:
                n_failures += 1
                log.exception("engine step failed")
                loop.fail_all(Broken(f"the engine failed and was reset: {error}"))
                loop.flush(self._publish_events)
                if n_failures >= MAX_FAILURES:
                    raise
            self.publish()
        if self.trouble:
            loop.end_all(Broken(self.trouble))
            loop.flush(self._publish_events)

    def _check_device(self, loop: EngineLoop, n_generated: int) -> None:
        """Forget device errors after a token. Raises one that surfaces late."""
        if self._n_device_errors and loop.stats.counters.n_generated_tokens > n_generated:
            device.synchronize()
            self._n_device_errors = 0

    def _lose_kv(self, loop: EngineLoop, error: DeviceError) -> None:
        """Fail requests in slots; end the engine at the second error."""
        self._n_device_errors += 1
        log.error("%s", error.message)
        loop.lose_kv(error)
        loop.flush(self._publish_events)
        if self._n_device_errors >= MAX_DEVICE_ERRORS:
            self._failure = error.message

    def _handle_messages(self, engine: LoadedEngine) -> None:
        """Handle all messages; wait for one when there is nothing to do."""
        is_idle = not engine.loop.is_busy
        if is_idle and self._inbox.empty():
            engine.loop.release_buffers()
            self._has_work = False
            self._handle(engine.idle.next_message(self._inbox))
        elif engine.loop.is_only_loading:
            with suppress(queue.Empty):
                self._handle(self._inbox.get(timeout=LOADING_S))
        # Messages posted by these wait for the next step: long work comes in pieces.
        for _ in range(self._inbox.qsize()):
            self._handle(self._inbox.get_nowait())
        if is_idle:
            self._gather()

    def _gather(self) -> None:
        """Wait shortly for requests that come together."""
        until = time.monotonic() + GATHER_S
        wait_s = GATHER_S if self._n_announced else 0.0
        while wait_s > 0:
            try:
                self._handle(self._inbox.get(timeout=wait_s))
            except queue.Empty:
                return
            wait_s = until - time.monotonic()
            if not self._n_announced:
                wait_s = min(wait_s, SUBMIT_S)

    def _handle(self, message: Message) -> None:
        self._has_work = True
        self._stepped_at = time.monotonic()
        message()

    def _is_done(self, loop: EngineLoop) -> bool:
        if self._drain_until is None:
            return False
        if time.monotonic() >= self._drain_until:
            loop.end_all(Busy("the model is stopping; try again in a moment"))
            loop.flush(self._publish_events)
        return not (loop.has_work or loop.is_holding)

    def _publish_events(self, events: Events) -> None:
        """Publish a snapshot that includes the events before they are delivered."""
        self.publish()
        self._deliver(events)

    def publish(self) -> None:
        """Publish a snapshot, and note a sign of life."""
        engine = self.loaded
        self._stepped_at = time.monotonic()
        self._has_work = engine.loop.is_busy or not self._inbox.empty()
        snapshot = engine.loop.snapshot()
        for report in engine.reporters:
            snapshot = report(snapshot)
        self._snapshot = snapshot
