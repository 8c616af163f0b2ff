"""Engine of a language model: the thread, and calls of a service."""

import os
from concurrent.futures import Future

from mlxstack.core.commands import (
    CollectGarbage,
    FlushResult,
    GCResult,
    SlotCommand,
    SlotCommandResult,
)
from mlxstack.core.errors import InvalidSlot
from mlxstack.core.interfaces import EngineStores, Manifest
from mlxstack.core.preset import Preset
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Request
from mlxstack.engine.admin import PrefixCacheAdmin
from mlxstack.engine.assembly import EngineAssembly
from mlxstack.engine.device_memory import DeviceMemory
from mlxstack.engine.loop import Deliver
from mlxstack.engine.parts import EngineParts
from mlxstack.engine.thread import EngineThread
from mlxstack.features.early_turns.engine import EarlyPrefill
from mlxstack.features.remote_kv.kv_export import KVExchange
from mlxstack.features.remote_kv.values import RemoteKV
from mlxstack.host.hardware import memory_of, this_memory


class ChatEngine(EngineThread):
    """Engine of a language model. Every public method is thread-safe.

    The KV budget is a share of `memory_bytes`, by default of this computer or MLX_STACK_MEMORY.
    `remote` has KV of other services.
    """

    def __init__(
        self,
        preset: Preset,
        stores: EngineStores,
        deliver: Deliver,
        *,
        parts: EngineParts | None = None,
        memory_bytes: int | None = None,
        remote: RemoteKV | None = None,
    ) -> None:
        budget = this_memory(os.environ) if memory_bytes is None else memory_of(memory_bytes)
        parts = parts or EngineParts()
        assembly = EngineAssembly(preset, stores, parts, budget, remote)
        super().__init__(assembly.load, parts, DeviceMemory(budget.total), deliver)
        self.preset = preset
        self.cache = PrefixCacheAdmin(self.run)

    def begin_early(self, request: Request, after: str) -> None:
        """Compute the expected next prompt after a request; see `EarlyPrefill.begin`."""

        def begin() -> None:
            if not self.is_stopping:
                self.loaded.features[EarlyPrefill].begin(request, after)

        self.post(begin)

    def run_slot_command(self, command: SlotCommand) -> Future[SlotCommandResult]:
        """Save, restore or erase an idle slot. The future raises StackErrors."""
        future: Future[SlotCommandResult] = Future()
        if not 0 <= command.slot < self.preset.slots.count:
            future.set_exception(InvalidSlot(command.slot, self.preset.slots.count))
            return future
        self.track(future)
        self.post(lambda: self.loaded.actions.run(command, future))
        return future

    def park(self) -> Future[FlushResult]:
        """Write all KV to disk that may be there."""
        return self.run(lambda loop: loop.slot_kv.park_all())

    def sweep(self, command: CollectGarbage) -> Future[GCResult]:
        """Collect garbage on disk, sparing files in use. The future raises StackErrors."""
        return self.wait(lambda engine: engine.disk_tier.writing.collect(command))

    def match_kv(self, prompt: PromptTokens, salt: str) -> Future[int]:
        """Number of cached tokens at the prompt's start."""
        return self.run(lambda loop: KVExchange(loop.slot_kv).match(prompt, salt))

    def export_kv(self, prompt: PromptTokens, salt: str) -> Future[Manifest]:
        """Write the first tokens' cached KV to disk. The future raises StackErrors."""
        return self.begin(
            lambda future: KVExchange(self.loaded.loop.slot_kv).export(prompt, salt, future)
        )

    def import_kv(self, manifest: Manifest) -> Future[int]:
        """Import KV files of a service; their tokens. The future raises Damaged."""
        return self.begin(
            lambda future: KVExchange(self.loaded.loop.slot_kv).adopt(manifest, future)
        )

    def reserve_disk(self, n_bytes: int) -> Future[GCResult]:
        """Make room for a service's files. The future raises DiskFull, Busy."""
        return self.wait(lambda engine: engine.disk_tier.writing.make_room((), n_bytes))

    def after_writes(self) -> Future[None]:
        """Wait until all pending writes are on disk, or have failed."""
        return self.wait(lambda engine: engine.disk_tier.writing.after(lambda: None))
