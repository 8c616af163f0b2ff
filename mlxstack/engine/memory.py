"""The KV memory beside the live slots: what is parked, how it is found, what has to go.

Belongs to the MLX thread. The policy's index knows which prefixes exist and where; this room
keeps the arrays of those that lie in memory.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.ask import Ask
from mlxstack.core.event import Miss, Source
from mlxstack.core.preset import PrefixCacheSpec
from mlxstack.engine import segments
from mlxstack.engine.context import Checkpoint, Context
from mlxstack.engine.segments import Segment
from mlxstack.policy import blocks, eviction, matching, records, restore
from mlxstack.policy.blocks import Chain
from mlxstack.policy.eviction import Pressure
from mlxstack.policy.index import Index
from mlxstack.policy.owners import Owners
from mlxstack.policy.prefix import common_prefix
from mlxstack.policy.records import Cut, Match, Place, Step, Trail
from mlxstack.policy.restore import Clues, Option, Plan, State

MOST_AGENTS = 512
SHOWN = 24
"""Tokens of the earlier prompt that explain a miss."""

SLACK = 0.05
"""Share of the budget freed beyond what is needed, so that not every turn has to evict."""


class Shelved(Struct, frozen=True):
    """A context in the index: its path, its checkpoints, and which of these keys are new."""

    segments: tuple[str, ...]
    checkpoints: tuple[str, ...]
    new: tuple[str, ...]


class Memory:
    """`budget` is bytes for live contexts, parked ones and pending writes together."""

    def __init__(self, identity: str, spec: PrefixCacheSpec, budget: int) -> None:
        self.spec = spec
        self.budget = budget
        self.index = Index(spec.block_size)
        self.owners = Owners(self.index)
        self._identity = identity
        self._kept: dict[str, Segment | Checkpoint] = {}
        self._transient: set[str] = set()
        self._ends: dict[int, dict[str, int]] = {}
        """Start of every segment and checkpoint that ends inside a block, by its end and key."""
        self._prompts: OrderedDict[str, tuple[int, ...]] = OrderedDict()

    def find(self, ask: Ask, slots: Sequence[Context], slot: int) -> tuple[Plan, Miss | None]:
        """Where the prompt can go on from, and why not from further on."""
        clues = self._clues(ask, slots)
        if not ask.use_cache:
            return Plan(), restore.why(Plan(), (), replace(clues, is_enabled=False))
        options = [_live(slots[slot], Source.SLOT, slot, ask, 1)]
        if self.spec.enabled:
            others = (i for i in range(len(slots)) if i != slot and len(slots[i]))
            block = self.spec.block_size
            options += [_live(slots[i], Source.FORK, i, ask, block) for i in others]
            options += self._stored(ask, slots[slot])
        plan = restore.plan(len(ask.tokens), options)
        return plan, self._told(restore.why(plan, options, clues), ask, slots)

    def missing(self, plan: Plan) -> list[str]:
        """Keys of the plan that are on disk only."""
        keys = [step.key for step in plan.path]
        if plan.checkpoint is not None:
            keys.append(plan.checkpoint)
        return [key for key in keys if key not in self._kept]

    def resume(self, context: Context, ask: Ask, plan: Plan, now: float) -> None:
        """Make the context the parked prefix of the plan; all its keys are in memory."""
        fresh = context.fresh(plan.position)
        parts = [self._kept[step.key] for step in plan.path]
        spans = segments.spans(fresh, [p for p in parts if isinstance(p, Segment)], plan.position)
        marks = [] if plan.checkpoint is None else [self._kept[plan.checkpoint]]
        fresh.adopt(
            ask.tokens[: plan.position], spans, [m for m in marks if isinstance(m, Checkpoint)]
        )
        context.become(fresh)
        context.salt = ask.salt
        if plan.path:
            context.anchor(plan.path[-1].key)
        self.index.touch([step.key for step in plan.path], now)

    def park(self, context: Context, now: float) -> Shelved:
        """Keep a copy of what is not known yet of this context, in memory."""
        shelved = self.shelve(context, now)
        self._transient.difference_update((*shelved.segments, *shelved.checkpoints))
        self._recall(context, shelved, now)
        if context.agent is not None and shelved.segments:
            mark = shelved.checkpoints[-1] if shelved.checkpoints else None
            self.owners.claim(context.agent, shelved.segments[-1], mark)
        return shelved

    def _recall(self, context: Context, shelved: Shelved, now: float) -> None:
        """What of the context lies on disk only comes to memory too, without reading it."""
        for key in shelved.segments:
            record = self.index.nodes[key].record
            is_whole = isinstance(record, records.Segment) and record.end <= len(context)
            if key not in self._kept and is_whole and isinstance(record, records.Segment):
                self.keep(key, segments.pack(context, record.start, record.end), now)
        for part, key in zip(context.checkpoints, shelved.checkpoints, strict=True):
            if key not in self._kept:
                self.keep(key, part, now)

    def shelve(self, context: Context, now: float) -> Shelved:
        """Put what is not known yet of this context into the index, to be written and let go."""
        context.checkpoint()
        chain = self._chain(context.tokens, self._salt(context))
        known = self._match(chain, context.tokens, context.trail())
        new = self._add_segments(context, chain, known, now)
        leaf = new[-1] if new else known.path[-1].key if known.path else None
        if leaf is None:
            return Shelved((), (), ())
        context.anchor(leaf)
        path = matching.reach(self.index, leaf, len(context))
        marks = [self._add_checkpoint(c, chain, context, path, now) for c in context.checkpoints]
        keys = [key for key, _ in marks]
        new += [key for key, is_new in marks if is_new]
        self._transient.update(new)
        return Shelved(tuple(step.key for step in path), tuple(keys), tuple(new))

    def array_of(self, key: str) -> Segment | Checkpoint | None:
        """The arrays of a record that lies in memory."""
        return self._kept.get(key)

    def keep(self, key: str, part: Segment | Checkpoint, now: float) -> None:
        """A known record was read from disk into memory."""
        if key in self.index.nodes:
            self._insert(self.index.nodes[key].record, Place.MEMORY, now)
            self._kept[key] = part

    def on_disk(self, record: records.Record, now: float) -> None:
        """A record exists on disk. One that was shelved only to be written leaves memory."""
        self._insert(record, Place.DISK, now)
        if record.key in self._transient:
            self._transient.discard(record.key)
            self._drop(record.key, Place.MEMORY)

    def lose(self, key: str) -> None:
        """A file is gone or damaged: what cannot be reached without it is forgotten too."""
        node = self.index.nodes.get(key)
        if node is None:
            return
        if Place.MEMORY not in node.places:
            for child in tuple(node.children):
                self.lose_all(child)
        self._drop(key, Place.DISK)

    def lose_all(self, key: str) -> None:
        """Forget a record and everything that continues it, wherever it lies."""
        for child in tuple(self.index.nodes[key].children):
            self.lose_all(child)
        for place in tuple(self.index.nodes[key].places):
            self._drop(key, place)

    def make_room(self, live_bytes: int, pressure: Pressure = Pressure.CALM) -> int:
        """Evict until live and parked bytes fit the budget; bytes freed."""
        before = self.index.memory_bytes
        over = live_bytes + before - self.budget
        n_entries = len(self._kept)
        if over <= 0 and n_entries <= self.spec.max_entries and pressure is Pressure.CALM:
            return 0
        goal = eviction.Goal(
            n_bytes=over + int(SLACK * self.budget) if over > 0 else 0,
            max_entries=self.spec.max_entries,
            policy=self.spec.eviction_policy,
            pressure=pressure,
        )
        for key in eviction.plan(eviction.entries(self.index), goal):
            self._drop(key, Place.MEMORY)
        return before - self.index.memory_bytes

    def remember(self, ask: Ask) -> None:
        """The prompt an agent has just sent: the next one is compared with it."""
        if ask.agent is None:
            return
        self._prompts.pop(ask.agent, None)
        self._prompts[ask.agent] = ask.tokens
        while len(self._prompts) > MOST_AGENTS:
            self._prompts.popitem(last=False)

    def path_of(self, tokens: Sequence[int], tenant: str) -> tuple[Step, ...]:
        """The records that hold the longest known part of these tokens, root first."""
        return self._match(self._chain(tokens, tenant), tokens, None).path

    def _drop(self, key: str, place: Place) -> None:
        """Forget what lies in this place, if it may go."""
        node = self.index.nodes.get(key)
        if node is None or not self.index.can_drop(key, place):
            return
        self.index.drop(key, place)
        if place is Place.MEMORY:
            del self._kept[key]
        if key not in self.index.nodes:
            self._transient.discard(key)
            self._ends.get(records.end_of(node.record), {}).pop(key, None)

    def _told(self, miss: Miss | None, ask: Ask, slots: Sequence[Context]) -> Miss | None:
        """The miss, with what the prompt would have had to go on with."""
        if miss is None or miss.at is None:
            return miss
        before = self._before(ask, slots)
        return replace(miss, instead=tuple(before[miss.at : miss.at + SHOWN]))

    def _stored(self, ask: Ask, template: Context) -> Iterable[Option]:
        chain = self._chain(ask.tokens, ask.salt)
        found = self._match(chain, ask.tokens, None)
        due = template.turning_point
        for option in restore.stored(found, template.is_sliceable):
            if option.source is Source.DISK and not self.spec.disk.enabled:
                continue
            yield replace(option, free_from=due) if due and template.is_sliceable else option

    def _match(self, chain: Chain, tokens: Sequence[int], trail: Trail | None) -> Match:
        """What the index knows of these tokens, to the token where something ends inside a block.

        Whatever reaches past the last known block ends before the next one would be full.
        """
        found = matching.match(self.index, chain.keys, trail=trail)
        size, last = (
            self.spec.block_size,
            min(found.covered // self.spec.block_size, len(chain.keys)),
        )
        cuts: list[Cut] = []
        for end in range(last * size + 1, min((last + 1) * size, len(tokens) + 1)):
            if end not in self._ends:
                continue
            state = blocks.state_at(chain, tokens, end)
            cuts.append(Cut(end, state))
            for key, start in self._ends[end].items():
                if end > found.covered and blocks.segment_key(state, start) == key:
                    trail = Trail(key, end)
        return matching.match(self.index, chain.keys, cuts, trail)

    def _add_segments(self, context: Context, chain: Chain, known: Match, now: float) -> list[str]:
        parent = known.path[-1].key if known.path else None
        size, new = self.spec.block_size, []
        for start, end in segments.pieces(known.covered, len(context)):
            key = blocks.segment_key(blocks.state_at(chain, context.tokens, end), start)
            packed = segments.pack(context, start, end)
            names = chain.keys[start // size : end // size]
            record = records.Segment(key, parent, start, end, packed.n_bytes, names)
            self._insert(record, Place.MEMORY, now)
            self._kept[key] = packed
            new.append(key)
            parent = key
        return new

    def _add_checkpoint(
        self, part: Checkpoint, chain: Chain, context: Context, path: Sequence[Step], now: float
    ) -> tuple[str, bool]:
        state = blocks.state_at(chain, context.tokens, part.position)
        key = blocks.checkpoint_key(state)
        if key in self.index.nodes:
            return key, False
        parent = next(step.key for step in path if step.start < part.position <= step.upto)
        record = records.Checkpoint(key, parent, part.position, part.n_bytes, state)
        self._insert(record, Place.MEMORY, now)
        self._kept[key] = part
        return key, True

    def _insert(self, record: records.Record, place: Place, now: float) -> None:
        self.index.insert(record, place, now)
        end = records.end_of(record)
        if end % self.spec.block_size:
            start = record.start if isinstance(record, records.Segment) else 0
            self._ends.setdefault(end, {})[record.key] = start

    def _salt(self, context: Context) -> str:
        """Contexts too short to be quantised yet are named apart: their KV is of another kind."""
        return f"{context.salt}\nshort" if len(context) < context.turning_point else context.salt

    def _chain(self, tokens: Sequence[int], tenant: str) -> Chain:
        root = blocks.start(blocks.salt(self._identity, tenant), self.spec.block_size)
        return blocks.extend(root, tokens)

    def _clues(self, ask: Ask, slots: Sequence[Context]) -> Clues:
        before = self._before(ask, slots)
        keys = self._chain(ask.tokens, ask.salt).keys
        return Clues(
            n_prompt=len(ask.tokens),
            block_size=self.spec.block_size,
            n_previous=len(before),
            n_common=common_prefix(before, ask.tokens),
            n_evicted=matching.was_known(self.index, keys),
        )

    def _before(self, ask: Ask, slots: Sequence[Context]) -> Sequence[int]:
        """The prompt to which this one is compared: the agent's last, else the nearest live one."""
        if ask.agent is not None and ask.agent in self._prompts:
            return self._prompts[ask.agent]
        live = [c.tokens[: c.n_prompt] for c in slots if c.salt == ask.salt and len(c)]
        return max(live, key=lambda tokens: common_prefix(tokens, ask.tokens), default=())


def _live(context: Context, source: Source, slot: int, ask: Ask, block: int) -> Option:
    """A live context as a source; from other slots whole blocks, where it can be cut."""
    n_common = 0
    if context.salt == ask.salt:
        n_common = common_prefix(context.tokens, ask.tokens)
    if context.is_cuttable:
        covered = min(n_common, len(ask.tokens) - 1)
        return Option(source, covered - covered % block, free_from=context.floor, slot=slot)
    states = [State(c.position) for c in context.checkpoints]
    return restore.live(source, slot, n_common, [*states, State(len(context))])
