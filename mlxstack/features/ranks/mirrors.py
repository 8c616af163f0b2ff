"""Mirrors: contexts, runner, cache and store whose operations all ranks repeat."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx

from mlxstack.core.commands import CollectGarbage, GCResult
from mlxstack.core.errors import Damaged, StackError
from mlxstack.core.interfaces import KVFile, KVFileHeader, KVStore
from mlxstack.core.preset import PrefixCacheSpec
from mlxstack.core.prompt_tokens import TokenRow
from mlxstack.engine.kv.prefix_cache import PrefixCache
from mlxstack.engine.kv.segments import Segment
from mlxstack.engine.kv.slot_context import NO_SOURCES, KVSources, SlotContext, StateCheckpoint
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.engine.model.runner import ModelRunner, SlotTokens
from mlxstack.features.ranks import wire
from mlxstack.features.ranks.group import RankGroup
from mlxstack.policy.kv import prefix_index
from mlxstack.policy.pass_layout import RowMode

T = TypeVar("T")


def _repeated(method: Callable[..., T]) -> Callable[..., T]:
    """The method of a context, on all ranks."""

    def change(context: "MirroredContext", *args: Any) -> T:
        numbers = [arg.number for arg in args if isinstance(arg, MirroredContext)]
        values = tuple(arg for arg in args if not isinstance(arg, MirroredContext))
        operation = wire.ChangeContext(context.number, method.__name__, values, *numbers)
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
        group.log(wire.NewContext(self.number, n_tokens))

    def new_empty(self, n_tokens: int = 0) -> SlotContext:
        """As `SlotContext.new_empty`, on all ranks."""
        return MirroredContext(self._cache_factory, self.group, n_tokens)

    def load(
        self,
        row: TokenRow,
        parts: Sequence[Sequence[mx.array]],
        checkpoints: Sequence[StateCheckpoint],
        sources: KVSources = NO_SOURCES,
    ) -> None:
        """As `SlotContext.load`, on all ranks."""
        operation = wire.Load(self.number, tuple(row.tokens), sources)
        self.group.repeat(operation, lambda: SlotContext.load(self, row, parts, checkpoints))

    clear = _repeated(SlotContext.clear)
    detach = _repeated(SlotContext.detach)
    reserve = _repeated(SlotContext.reserve)
    checkpoint = _repeated(SlotContext.checkpoint)
    begin_proposal = _repeated(SlotContext.begin_proposal)
    end_proposal = _repeated(SlotContext.end_proposal)
    rewind = _repeated(SlotContext.rewind)
    fork_from = _repeated(SlotContext.fork_from)
    take_over = _repeated(SlotContext.take_over)


class MirroredRunner(ModelRunner):
    """Runs forward passes on all ranks."""

    can_run_ahead = False

    def __init__(self, model: Any, group: RankGroup, rows: RowMode) -> None:
        super().__init__(model, rows=rows)
        self._group = group

    def execute(self, plan: Sequence[SlotTokens], views: object = None) -> mx.array:
        """As `ModelRunner.execute`; evaluated, because all ranks evaluate the same."""
        assert views is None, "ranks do not stack rows"
        tokens: list[Any] = [slot.tokens.tolist() for slot in plan]
        return self._group.run_pass(
            self, [slot.caches for slot in plan], [tuple(ids) for ids in tokens]
        )


class MirroredPrefixCache(PrefixCache):
    """Prefix cache of all ranks, each with its shard of the KV."""

    def __init__(
        self,
        group: RankGroup,
        identity: str,
        spec: PrefixCacheSpec,
        budget: int,
        quantized_start: int,
    ) -> None:
        super().__init__(identity, spec, budget, quantized_start)
        self._group = group

    def put(
        self,
        record: prefix_index.Record,
        part: Segment | StateCheckpoint,
        now: float,
        context: SlotContext | None = None,
    ) -> None:
        """As `PrefixCache.put`, on all ranks; each takes its shard of the arrays."""
        super().put(record, part, now, context)
        operation: wire.Operation = wire.Adopt(record.key)
        if isinstance(context, MirroredContext) and isinstance(part, Segment):
            operation = wire.Pack(record.key, context.number, part.start, part.end)
        elif isinstance(context, MirroredContext) and isinstance(part, StateCheckpoint):
            operation = wire.Mark(record.key, context.number, part.position)
        self._group.log(operation)

    def note_unused(self, key: str) -> None:
        """As `PrefixCache.note_unused`, on all ranks."""
        self._group.log(wire.Discard(key))

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
        return self._together(wire.WriteKV(file.key, file.meta), partial(self._store.write, file))

    def flush(self) -> None:
        """As `KVStore.flush`, on all ranks."""
        self._together(wire.FlushKV(), self._store.flush)

    def read(self, identity: str, key: str) -> KVFile:
        """As `KVStore.read`. Raises Damaged also when another rank cannot read its shard."""
        return self._read(key, partial(self._store.read, identity, key))

    def read_into(self, identity: str, key: str, rows: Iterable[memoryview]) -> None:
        """As `KVStore.read_into`. Raises Damaged also when another rank cannot read its shard."""
        self._read(key, partial(self._store.read_into, identity, key, rows))

    def headers(self, identity: str) -> Iterator[KVFileHeader]:
        """Headers of the files that all ranks have."""
        return (head for head in self._store.headers(identity) if head.key in self._group.keys)

    def sweep(self, command: CollectGarbage, in_use: frozenset[tuple[str, str]]) -> GCResult:
        """As `KVStore.sweep`; the other ranks collect by the same command."""
        self._group.ask(wire.SweepKV(command))
        return self._store.sweep(command, in_use)

    def _together(self, job: wire.Job, work: Callable[[], T]) -> T:
        """Do `work` here while the other ranks do the job."""
        outcome = self._group.ask(job)
        done = work()
        outcome.result()
        return done

    def _read(self, key: str, work: Callable[[], T]) -> T:
        outcome = self._group.ask(wire.ReadKV(key))
        done = work()
        try:
            outcome.result()
        except StackError as error:
            raise Damaged(error.message) from error
        return done
