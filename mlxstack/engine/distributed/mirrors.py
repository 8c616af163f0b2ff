"""Mirrors: contexts, runner, cache and store whose operations all ranks repeat."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx

from mlxstack.core.commands import CollectGarbage, GCResult
from mlxstack.core.errors import Damaged, StackError
from mlxstack.core.ports import KVFile, KVFileHeader, KVStore
from mlxstack.core.preset import PrefixCacheSpec
from mlxstack.engine.distributed import wire
from mlxstack.engine.distributed.group import RankGroup
from mlxstack.engine.kv.prefix_cache import PrefixCache
from mlxstack.engine.kv.segments import Segment
from mlxstack.engine.kv.slot_context import SlotContext, StateCheckpoint
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.policy.kv import prefix_index

T = TypeVar("T")


def _repeated(method: Callable[..., T]) -> Callable[..., T]:
    """The method of a context, on all ranks."""

    def change(context: "MirroredContext", *args: int) -> T:
        operation = wire.ChangeContext(context.number, method.__name__, args)
        return context.group.repeat(operation, partial(method, context, *args))

    return change


class MirroredContext(SlotContext):
    """Context of all ranks, each with its shard of the KV.

    What a forward pass adds is not logged: the other ranks run the pass too.
    """

    def __init__(self, cache_factory: CacheFactory, group: RankGroup, n_tokens: int = 0) -> None:
        super().__init__(cache_factory)
        if n_tokens:
            self.caches = cache_factory.make(n_tokens)
        self.group = group
        self.number = group.register(self)
        self._sources: tuple[wire.Keys, wire.Keys, int, bool] = (), (), 0, False
        group.log(wire.NewContext(self.number, n_tokens))

    def new_empty(self, n_tokens: int = 0) -> SlotContext:
        """As `SlotContext.new_empty`, on all ranks."""
        return MirroredContext(self._cache_factory, self.group, n_tokens)

    def note_sources(
        self,
        segments: Sequence[str],
        checkpoints: Sequence[str],
        n_room: int,
        *,
        is_from_disk: bool = False,
    ) -> None:
        """Note the keys of the KV that `load` is given next."""
        self._sources = tuple(segments), tuple(checkpoints), n_room, is_from_disk

    def note_packed(self, start: int, end: int) -> None:
        """Note the segment that the prefix cache is given next."""
        self.group.packing = self.number, start, end

    def load(
        self,
        tokens: Sequence[int],
        parts: Sequence[Sequence[mx.array]],
        checkpoints: Sequence[StateCheckpoint],
    ) -> None:
        """As `SlotContext.load`, on all ranks."""
        operation = wire.Load(self.number, tuple(tokens), *self._sources)
        self.group.repeat(operation, lambda: SlotContext.load(self, tokens, parts, checkpoints))

    def fork_from(self, other: SlotContext, position: int, n_room: int = 0) -> int:
        """As `SlotContext.fork_from`, on all ranks."""
        assert isinstance(other, MirroredContext)
        operation = wire.Fork(self.number, other.number, position, n_room)
        return self.group.repeat(
            operation, lambda: SlotContext.fork_from(self, other, position, n_room)
        )

    def take_over(self, other: SlotContext) -> None:
        """As `SlotContext.take_over`, on all ranks."""
        assert isinstance(other, MirroredContext)
        operation = wire.TakeOver(self.number, other.number)
        self.group.repeat(operation, lambda: SlotContext.take_over(self, other))

    clear = _repeated(SlotContext.clear)
    detach = _repeated(SlotContext.detach)
    reserve = _repeated(SlotContext.reserve)
    checkpoint = _repeated(SlotContext.checkpoint)
    begin_draft = _repeated(SlotContext.begin_draft)
    end_draft = _repeated(SlotContext.end_draft)
    rewind = _repeated(SlotContext.rewind)


class MirroredRunner(ModelRunner):
    """Runs forward passes on all ranks."""

    can_run_ahead = False
    can_stack = False

    def __init__(self, model: Any, group: RankGroup, *, is_batching: bool, is_ragged: bool) -> None:
        super().__init__(model, is_batching=is_batching, is_ragged=is_ragged)
        self._group = group

    def execute(self, plan: Sequence[SlotTokens], views: object = None) -> mx.array:
        """As `ModelRunner.execute`; evaluated, because all ranks evaluate the same."""
        assert views is None, "ranks do not stack rows"
        tokens: list[Any] = [slot.tokens.tolist() for slot in plan]
        return self._group.run_pass(
            self, [slot.caches for slot in plan], [tuple(each) for each in tokens]
        )


class MirroredPrefixCache(PrefixCache):
    """Prefix cache of all ranks, each with its shard of the KV."""

    def __init__(
        self,
        group: RankGroup,
        identity: str,
        spec: PrefixCacheSpec,
        budget: int,
        turning_point: int,
    ) -> None:
        super().__init__(identity, spec, budget, turning_point)
        self._group = group

    def put(self, record: prefix_index.Record, part: Segment | StateCheckpoint, now: float) -> None:
        """As `PrefixCache.put`, on all ranks."""
        super().put(record, part, now)
        self._group.log(self._source(record.key, part))

    def note_unused(self, key: str) -> None:
        """As `PrefixCache.note_unused`, on all ranks."""
        self._group.log(wire.Discard(key))

    def _source(self, key: str, part: Segment | StateCheckpoint) -> wire.Operation:
        """The operation by which another rank gets its shard of these arrays."""
        if isinstance(part, StateCheckpoint):
            holder = self._group.holder_of(part)
            return wire.Adopt(key) if holder is None else wire.Mark(key, holder, part.position)
        packing, self._group.packing = self._group.packing, None
        if packing is None or packing[1:] != (part.start, part.end):
            return wire.Adopt(key)
        return wire.Pack(key, *packing)

    def _let_go(self, key: str) -> None:
        if key in self._kept:
            self._group.log(wire.Drop(key))
        super()._let_go(key)


class MirroredStore:
    """KV store of all ranks, each with the files of its shard."""

    def __init__(self, store: KVStore, group: RankGroup) -> None:
        self._store = store
        self._group = group
        self.has = store.has
        self.note = store.note
        self.noted = store.noted
        self.head = store.head
        self.make_room = store.make_room

    def write(self, file: KVFile) -> int:
        """As `KVStore.write`, on all ranks."""
        others = self._group.ask(wire.WriteKV(file.key, file.meta))
        n_bytes = self._store.write(file)
        others.result()
        return n_bytes

    def flush(self) -> None:
        """As `KVStore.flush`, on all ranks."""
        others = self._group.ask(wire.FlushKV())
        self._store.flush()
        others.result()

    def read(self, identity: str, key: str) -> KVFile:
        """As `KVStore.read`. Raises Damaged also when another rank cannot read its shard."""
        others = self._group.ask(wire.ReadKV(key))
        file = self._store.read(identity, key)
        self._await(others)
        return file

    def read_into(self, identity: str, key: str, rows: Iterable[memoryview]) -> None:
        """As `KVStore.read_into`. Raises Damaged also when another rank cannot read its shard."""
        others = self._group.ask(wire.ReadKV(key))
        self._store.read_into(identity, key, rows)
        self._await(others)

    def headers(self, identity: str) -> Iterator[KVFileHeader]:
        """Headers of the files that all ranks have."""
        return (head for head in self._store.headers(identity) if head.key in self._group.keys)

    def sweep(self, command: CollectGarbage, in_use: frozenset[tuple[str, str]]) -> GCResult:
        """As `KVStore.sweep`; the other ranks collect by the same command."""
        self._group.ask(wire.SweepKV(command))
        return self._store.sweep(command, in_use)

    def _await(self, others: Any) -> None:
        try:
            others.result()
        except StackError as error:
            raise Damaged(error.message) from error
