"""One ask on its way through the engine, and what the service needs of an engine."""

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from mlxstack.core.commands import (
    CacheCommand,
    CollectGarbage,
    FlushResult,
    GCResult,
    SlotCommand,
    SlotCommandResult,
)
from mlxstack.core.engine_events import Event, RequestFailed, RequestFinished
from mlxstack.core.engine_snapshot import Snapshot
from mlxstack.core.model_info import ModelFacts
from mlxstack.core.request import Request


class Engine(Protocol):
    """What the service needs of `mlxstack.engine.thread.Engine`."""

    tokenizer: Any

    def start(self) -> Future[ModelFacts]: ...
    def submit(self, request: Request) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def run_slot_command(self, act: SlotCommand) -> Future[SlotCommandResult]: ...
    def run_cache_command(self, command: CacheCommand) -> Future[Any]: ...
    def park(self) -> Future[FlushResult]: ...
    def sweep(self, wanted: CollectGarbage) -> Future[GCResult]: ...
    def snapshot(self) -> Snapshot: ...
    def stalled_s(self) -> float: ...
    def is_alive(self) -> bool: ...
    def stop(self, drain_s: float) -> Future[None]: ...


class RequestStream:
    """One ask under way: its events in order."""

    def __init__(self, request: Request, queue: asyncio.Queue[Event], engine: Engine) -> None:
        self.request = request
        self.is_over = False
        self._is_cancelled = False
        self._queue = queue
        self._engine = engine

    def cancel(self) -> None:
        """The engine shall stop; its last event still comes. Nothing, once it is over."""
        if not self.is_over and not self._is_cancelled:
            self._is_cancelled = True
            self._engine.cancel(self.request.id)

    async def next(self, patience_s: float) -> Event | None:
        """The next event, or None after `patience_s` of silence. Raises what failed the ask."""
        event = await self._within(patience_s)
        if isinstance(event, RequestFailed):
            self.is_over = True
            raise event.error
        self.is_over = isinstance(event, RequestFinished)
        return event

    async def _within(self, patience_s: float) -> Event | None:
        if not self._queue.empty():
            return self._queue.get_nowait()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                return await self._queue.get()
        return None
