"""One ask on its way through the engine, and what the service needs of an engine."""

import asyncio
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from mlxstack.core.commands import (
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

if TYPE_CHECKING:
    from mlxstack.engine.admin import PrefixCacheAdmin


class Engine(Protocol):
    """Life cycle of an engine, whatever its model is for."""

    tokenizer: Any

    def start(self) -> Future[ModelFacts]: ...
    def snapshot(self) -> Snapshot: ...
    def stalled_s(self) -> float: ...
    def is_alive(self) -> bool: ...
    def stop(self, drain_s: float) -> Future[None]: ...


class GenerationEngine(Engine, Protocol):
    """Engine of a language model, with slots and a prefix cache."""

    cache: "PrefixCacheAdmin"

    def submit(self, request: Request) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def run_slot_command(self, act: SlotCommand) -> Future[SlotCommandResult]: ...
    def park(self) -> Future[FlushResult]: ...
    def sweep(self, wanted: CollectGarbage) -> Future[GCResult]: ...


@runtime_checkable
class Embedder(Engine, Protocol):
    """Engine of an embedding model."""

    def embed(self, texts: tuple[tuple[int, ...], ...]) -> Future[tuple[bytes, ...]]: ...


class RequestStream:
    """One ask under way: its events in order."""

    def __init__(
        self, request: Request, queue: asyncio.Queue[Event], engine: GenerationEngine
    ) -> None:
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
