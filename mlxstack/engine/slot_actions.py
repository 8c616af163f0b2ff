"""Slot actions: save, restore and erase idle slots."""

import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from msgspec import structs

from mlxstack.core.commands import (
    EraseSlot,
    EvictAgentFromSlot,
    RestoreSlot,
    SaveSlot,
    SlotCommand,
    SlotCommandResult,
    SlotEraseResult,
    SlotRestoreResult,
)
from mlxstack.core.errors import StackError, describe_error
from mlxstack.engine.device_errors import raise_device_error
from mlxstack.engine.kv.disk_tier import DiskTier
from mlxstack.engine.kv.park import IncrementalPack
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.kv.slot_restore import RestoreRequest
from mlxstack.engine.kv.write_queue import copy_outcome
from mlxstack.engine.loop import EngineLoop

log = logging.getLogger(__name__)

Answer = Future[SlotCommandResult]


class SlotActionRunner:
    """Runs slot actions. MLX thread only; `publish` precedes each answer."""

    def __init__(self, loop: EngineLoop, publish: Callable[[], None]) -> None:
        self._loop = loop
        self._disk_tier: DiskTier = loop.slot_kv.disk_tier
        self._publish = publish
        self._ids = (f"action-{n}" for n in itertools.count())

    def run(self, command: SlotCommand, future: Answer) -> None:
        """Run once the slot is idle; the future raises StackErrors."""

        def lost(error: StackError) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        def begin(context: SlotContext) -> None:
            if not future.set_running_or_notify_cancel():
                self._loop.release(command.slot)
                return
            try:
                self._begin(command, context, future)
            except Exception as error:
                self._fail(command, future, error)

        # A save must not replace a good file by what is left of a broken context.
        on_lost = lost if isinstance(command, SaveSlot) else None
        self._loop.when_idle(next(self._ids), command.slot, begin, on_lost)

    def _begin(self, command: SlotCommand, context: SlotContext, future: Answer) -> None:
        if isinstance(command, EraseSlot):
            n_erased = len(context)
            context.clear()
            self._done(command, future, SlotEraseResult(command.slot, n_erased))
        elif isinstance(command, EvictAgentFromSlot):
            self._vacate(command, context, future)
        elif isinstance(command, SaveSlot):
            self._save(command, context, future)
        else:

            def room(n_bytes: int) -> None:
                loop.slot_kv.reserve_memory(context, n_bytes, loop.idle_slots)

            loop = self._loop
            restore = RestoreRequest(command.name, context, loop.n_ctx, room)
            restoring = self._disk_tier.restore(restore)
            restoring.add_done_callback(lambda done: self._restored(command, done, future))

    def _save(self, command: SaveSlot, context: SlotContext, future: Answer) -> None:
        started = time.perf_counter()
        self._disk_tier.check(context, command.name)
        packing = IncrementalPack(context, self._disk_tier.parker)

        def end() -> None:
            saving = self._disk_tier.save(context, command.slot, command.name, started)
            self._loop.release(command.slot)
            copy_outcome(saving, future)

        self._loop.slot_kv.background.run(packing.go_on, end, partial(self._fail, command, future))

    def _vacate(self, command: EvictAgentFromSlot, context: SlotContext, future: Answer) -> None:
        """Compare names: a hint or the conversation may have identified the agent."""
        if self._loop.agent_in(command.slot) != command.agent:
            self._loop.release(command.slot)
            future.set_result(SlotEraseResult(command.slot, 0))
            return
        n_tokens = len(context)
        if command.is_kept:
            self._loop.slot_kv.store(context)
        context.clear()
        self._done(command, future, SlotEraseResult(command.slot, n_tokens))

    def _restored(
        self, command: RestoreSlot, done: "Future[SlotRestoreResult]", future: Answer
    ) -> None:
        try:
            self._done(command, future, structs.replace(done.result(), slot=command.slot))
        except Exception as error:
            self._fail(command, future, error)

    def _done(self, command: SlotCommand, future: Answer, done: SlotCommandResult) -> None:
        self._loop.renew(command.slot)
        self._publish()
        future.set_result(done)

    def _fail(self, command: SlotCommand, future: Answer, error: Exception) -> None:
        self._loop.release(command.slot)
        if not isinstance(error, StackError):
            log.exception("a slot action failed", exc_info=error)
        future.set_exception(describe_error(error, "this slot action"))
        raise_device_error(error)
