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
from mlxstack.engine.kv.park import BackgroundSteps
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.kv.slot_restore import RestoreRequest
from mlxstack.engine.kv.write_queue import copy_outcome
from mlxstack.engine.step import EngineLoop

log = logging.getLogger(__name__)


class SlotActionRunner:
    """Runs slot actions. MLX thread only; `publish` precedes each answer."""

    def __init__(
        self,
        turns: EngineLoop,
        archive: DiskTier,
        pieces: BackgroundSteps,
        publish: Callable[[], None],
    ) -> None:
        self._turns = turns
        self._archive = archive
        self._pieces = pieces
        self._publish = publish
        self._ids = (f"action-{n}" for n in itertools.count())

    def run(self, act: SlotCommand, future: "Future[SlotCommandResult]") -> None:
        """Run once the slot is idle; the future raises StackErrors."""

        def lost(error: StackError) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        def begin(context: SlotContext) -> None:
            if not future.set_running_or_notify_cancel():
                self._turns.release(act.slot)
                return
            try:
                self._begin(act, context, future)
            except Exception as error:
                self._fail(act, future, error)

        # A save must not replace a good file by what is left of a broken context.
        on_lost = lost if isinstance(act, SaveSlot) else None
        self._turns.when_idle(next(self._ids), act.slot, begin, on_lost)

    def _begin(
        self, act: SlotCommand, context: SlotContext, future: "Future[SlotCommandResult]"
    ) -> None:
        if isinstance(act, EraseSlot):
            n_erased = len(context)
            context.clear()
            self._done(act, future, SlotEraseResult(act.slot, n_erased))
        elif isinstance(act, EvictAgentFromSlot):
            self._vacate(act, context, future)
        elif isinstance(act, SaveSlot):
            self._save(act, context, future)
        else:
            room = partial(self._turns.slot_kv.reserve_memory, context)
            wanted = RestoreRequest(act.name, context, self._turns.n_ctx, room)
            restoring = self._archive.restore(wanted)
            restoring.add_done_callback(lambda done: self._restored(act, done, future))

    def _save(
        self, act: SaveSlot, context: SlotContext, future: "Future[SlotCommandResult]"
    ) -> None:
        started = time.perf_counter()
        self._archive.check(context, act.name)
        packing = self._archive.incremental_pack(context)

        def end(error: Exception | None) -> None:
            try:
                if error is not None:
                    raise error
                saving = self._archive.save(context, act.slot, act.name, started)
            except Exception as why:
                self._fail(act, future, why)
            else:
                self._turns.release(act.slot)
                copy_outcome(saving, future)

        self._pieces.run(packing.go_on, end)

    def _vacate(
        self, act: EvictAgentFromSlot, context: SlotContext, future: "Future[SlotCommandResult]"
    ) -> None:
        """Compare names: a hint or the conversation may have identified the agent."""
        if self._turns.agent_in(act.slot) != act.agent:
            self._turns.release(act.slot)
            future.set_result(SlotEraseResult(act.slot, 0))
            return
        n_tokens = len(context)
        if act.is_kept:
            self._turns.slot_kv.store(context)
        context.clear()
        self._done(act, future, SlotEraseResult(act.slot, n_tokens))

    def _restored(
        self,
        act: RestoreSlot,
        done: "Future[SlotRestoreResult]",
        future: "Future[SlotCommandResult]",
    ) -> None:
        try:
            self._turns.slot_kv.share_restored(self._turns.slots[act.slot])
            self._done(act, future, structs.replace(done.result(), slot=act.slot))
        except Exception as error:
            self._fail(act, future, error)

    def _done(
        self, act: SlotCommand, future: "Future[SlotCommandResult]", done: SlotCommandResult
    ) -> None:
        self._turns.renew(act.slot)
        self._publish()
        future.set_result(done)

    def _fail(
        self, act: SlotCommand, future: "Future[SlotCommandResult]", error: Exception
    ) -> None:
        self._turns.release(act.slot)
        if not isinstance(error, StackError):
            log.exception("a slot action failed", exc_info=error)
        future.set_exception(describe_error(error, "this slot action"))
        raise_device_error(error)
