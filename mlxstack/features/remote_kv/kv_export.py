"""KV exchange on the MLX thread: export and import of cached KV."""

from collections.abc import Sequence
from concurrent.futures import Future

from msgspec.structs import replace

from mlxstack.core.errors import Damaged, Unsupported, describe_error
from mlxstack.core.interfaces import KVFileHeader, Manifest
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.engine.kv.disk_tier import DiskTier
from mlxstack.engine.kv.park import IncrementalPack
from mlxstack.engine.kv.segments import check_cover, record_of
from mlxstack.engine.kv.write_queue import copy_outcome
from mlxstack.engine.slots.slot_kv_manager import SlotKVManager
from mlxstack.policy.kv.prefix_index import CheckpointMeta, Record, SegmentMeta
from mlxstack.policy.kv.reuse_plan import ReusePlan


class KVExchange:
    """KV exchange of one engine, as files of its identity."""

    def __init__(self, slot_kv: SlotKVManager) -> None:
        self._slot_kv = slot_kv
        self._disk_tier: DiskTier = slot_kv.disk_tier

    def match(self, prompt: PromptTokens, salt: str) -> int:
        """Cached tokens at the prompt's start: in slot, memory or disk."""
        return max(self._stored(prompt, salt).position, self._slot_kv.nearest(prompt, salt)[0])

    def export(self, prompt: PromptTokens, salt: str, result: "Future[Manifest]") -> None:
        """Write the cached KV of the first tokens; returns the manifest."""
        spec = self._slot_kv.prefix_cache.spec
        if not (spec.enabled and spec.disk.enabled):
            raise Unsupported(
                "KV is exchanged as files: set prefix_cache.enabled and prefix_cache.disk.enabled"
            )
        n_live, context = self._slot_kv.nearest(prompt, salt)
        is_live = n_live > self._stored(prompt, salt).position
        if context is None or not is_live or not context.is_storable:
            copy_outcome(self._write(prompt, salt), result)
            return
        packing = IncrementalPack(context, self._disk_tier.parker)

        def end() -> None:
            if packing.is_current:
                self._slot_kv.store(context)
            copy_outcome(self._write(prompt, salt), result)

        def fail(error: Exception) -> None:
            result.set_exception(describe_error(error, "an export of KV"))

        self._slot_kv.background.run(packing.go_on, end, fail)

    def adopt(self, manifest: Manifest, result: "Future[int]") -> None:
        """Index files of another service; the future raises Damaged."""
        self._disk_tier.adopt(manifest, self._records, result)

    def _write(self, prompt: PromptTokens, salt: str) -> "Future[Manifest]":
        return self._disk_tier.export(self._stored(prompt, salt), prompt, salt)

    def _stored(self, prompt: PromptTokens, salt: str) -> ReusePlan:
        return self._slot_kv.lookup.kept(prompt, salt, self._slot_kv.slots[0])

    def _records(self, manifest: Manifest, headers: Sequence[KVFileHeader]) -> list[Record]:
        """Index records of sent files, parents first. Raises Damaged.

        They must be of this model, and of the tokens of the manifest as far as it goes.
        """
        if manifest.identity != self._slot_kv.prefix_cache.identity:
            raise Damaged("the KV is of another model, adapter, KV precision or version of mlx-lm")
        prefix_cache = self._slot_kv.prefix_cache
        chains = prefix_cache.chains(manifest, manifest.salt)
        names = {name for chain in chains for name in chain.keys}
        segments = headers[: len(manifest.segments)]
        check_cover("of another service", manifest, segments)
        if len({*manifest.segments}) < len(segments):
            raise Damaged("the KV names a file twice")
        records: list[Record] = []
        for head in segments:
            record = record_of(head)
            n_known = len(manifest.tokens) // prefix_cache.spec.block_size
            n_known -= head.start // prefix_cache.spec.block_size
            is_ours = isinstance(record, SegmentMeta) and names.issuperset(record.blocks[:n_known])
            if not is_ours:
                raise Damaged(f"the KV file {head.key} is not of these tokens")
            self._disk_tier.layouts.check_head(head)
            records.append(replace(record, parent=records[-1].key if records else None))
        for head in headers[len(segments) :]:
            record = record_of(head)
            parent = next((s.key for s in segments if s.start < head.end <= s.end), None)
            if not isinstance(record, CheckpointMeta) or parent is None:
                raise Damaged(f"the KV file {head.key} is no checkpoint of these tokens")
            records.append(replace(record, parent=parent))
        return records
