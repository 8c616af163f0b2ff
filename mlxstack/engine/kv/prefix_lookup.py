"""Finds what of a prompt need not be computed, and why it is not more."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.commands import AgentKVLocation
from mlxstack.core.engine_events import CacheMiss, KVSource
from mlxstack.core.request import Request
from mlxstack.engine.kv.prefix_cache import PrefixCache
from mlxstack.engine.kv.shared_prefixes import SharedPrefixes
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.policy import block_hash, kv_records, prefix_match, reuse_plan
from mlxstack.policy.block_hash import BlockHashes
from mlxstack.policy.common_prefix import common_prefix
from mlxstack.policy.kv_records import StorageTier
from mlxstack.policy.reuse_plan import MissContext, RestorePoint, ReusePlan, ReuseSource

MOST_AGENTS = 512
MOST_PROMPT_BYTES = 64 << 20
"""Bytes of all last prompts; a small KV budget gives them less."""

PROMPT_SHARE = 32
"""The last prompts take at most this part of the KV budget: 1 / PROMPT_SHARE."""

KEY_BYTES = 80
"""A block key in a chain: 32 bytes, and what Python adds."""

FIRST_WORDS = 48
"""Tokens after the head by which a conversation without a name is told from another."""

SHOWN = 24
"""Tokens of the earlier prompt that explain a miss."""


class LastPrompt(Struct, frozen=True):
    """The last prompt of a conversation as uint32, and its block chains."""

    tokens: "array[int]"
    salt: str
    chains: tuple[BlockHashes, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes that it occupies."""
        n_keys = sum(len(chain.keys) for chain in self.chains)
        return self.tokens.itemsize * len(self.tokens) + KEY_BYTES * n_keys


class PrefixLookup:
    """Belongs to the MLX thread. `learning` learns what several conversations begin with.

    `is_foreign` tells whether an agent has KV, but of other models only.
    """

    def __init__(
        self,
        memory: PrefixCache,
        shared_prefixes: SharedPrefixes,
        is_foreign: Callable[[str], bool],
    ) -> None:
        self._memory = memory
        self._shared_prefixes = shared_prefixes
        self._is_foreign = is_foreign
        self._prompts: OrderedDict[str, LastPrompt] = OrderedDict()
        self._most_bytes = min(MOST_PROMPT_BYTES, memory.budget // PROMPT_SHARE)
        self.n_bytes = 0
        """Bytes of all last prompts, a part of the KV budget."""
        self._hashed: tuple[Request, tuple[BlockHashes, ...]] | None = None

    def find(
        self, request: Request, slots: Sequence[SlotContext], slot: int, *, may_read: bool = True
    ) -> tuple[ReusePlan, CacheMiss | None]:
        """Where the prompt can go on from, on disk if it `may_read`; why not from further on."""
        chains, before = self._chains(request), self._before(request, slots)
        clues = self._clues(request, chains, before)
        if not request.use_cache:
            return ReusePlan(), reuse_plan.explain_miss(
                ReusePlan(), (), replace(clues, is_enabled=False)
            )
        options = [_live(slots[slot], KVSource.SLOT, slot, request, 1)]
        if self._memory.spec.enabled:
            others = (i for i in range(len(slots)) if i != slot and len(slots[i]))
            block = self._memory.spec.block_size
            options += [_live(slots[i], KVSource.FORK, i, request, block) for i in others]
            stored = self._stored(request.tokens, chains, slots[slot])
            options += [one for one in stored if may_read or one.source is not KVSource.DISK]
        plan = reuse_plan.plan(len(request.tokens), options)
        return plan, _told(reuse_plan.explain_miss(plan, options, clues), before)

    def kept(self, tokens: Sequence[int], salt: str, template: SlotContext) -> ReusePlan:
        """What a prompt that begins with these tokens would go on from, beside the slots."""
        chains = self._memory.chains(tokens, salt)
        return reuse_plan.plan(len(tokens) + 1, tuple(self._stored(tokens, chains, template)))

    def remember(self, request: Request) -> None:
        """The prompt that has just been seated: heads are learned, the agent's next is compared."""
        chains = self._chains(request)
        self._shared_prefixes.observe(_conversation(request, chains[0]), chains[0], request)
        name = request.agent or request.display_name
        if name is None:
            return
        self.forget(name)
        self._prompts[name] = LastPrompt(array("I", request.tokens), request.salt, chains)
        self.n_bytes += self._prompts[name].n_bytes
        while len(self._prompts) > MOST_AGENTS or self._is_over():
            self.forget(next(iter(self._prompts)))

    def locate(self, agent: str) -> AgentKVLocation:
        """Where the last prompt of this agent is kept beside the slots."""
        nodes = [self._memory.index.nodes[key] for key in self.keys_of(agent)]
        return AgentKVLocation(
            agent=agent,
            n_tokens=max((kv_records.end_of(node.record) for node in nodes), default=0),
            memory_bytes=sum(n.record.n_bytes for n in nodes if StorageTier.MEMORY in n.tiers),
            disk_bytes=sum(n.record.n_bytes for n in nodes if StorageTier.DISK in n.tiers),
        )

    def last(self, agent: str) -> LastPrompt | None:
        """The last prompt of this agent."""
        return self._prompts.get(agent)

    def keys_of(self, agent: str) -> tuple[str, ...]:
        """The records that hold the longest known part of its last prompt, root first."""
        last = self._prompts.get(agent)
        if last is None:
            return ()
        matches = [self._memory.match(chain, last.tokens, None) for chain in last.chains]
        found = max(matches, key=lambda match: match.covered)
        return (*(step.key for step in found.path), *(one.key for one in found.checkpoints))

    def sharing(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Whose last prompt begins with what these records hold, the latest first. O(agents)."""
        nodes = (self._memory.index.nodes.get(key) for key in keys)
        known = [node.record for node in nodes if node is not None]
        held = [one for one in known if isinstance(one, kv_records.SegmentMeta) and one.blocks]
        if not held:
            return ()
        place, block = held[-1].end // self._memory.spec.block_size - 1, held[-1].blocks[-1]
        return tuple(
            name
            for name, one in reversed(self._prompts.items())
            if any(chain.keys[place : place + 1] == (block,) for chain in one.chains)
        )

    def forget(self, agent: str) -> None:
        """The next prompt of this agent is compared to nothing of its own."""
        if last := self._prompts.pop(agent, None):
            self.n_bytes -= last.n_bytes

    def _is_over(self) -> bool:
        """Whether the last prompts take too many bytes; the newest one is always kept."""
        return len(self._prompts) > 1 and self.n_bytes > self._most_bytes

    def _chains(self, request: Request) -> tuple[BlockHashes, ...]:
        """Hashed once for all that is asked about this ask."""
        if self._hashed is None or self._hashed[0] is not request:
            self._hashed = request, self._memory.chains(request.tokens, request.salt)
        return self._hashed[1]

    def _stored(
        self, tokens: Sequence[int], chains: Iterable[BlockHashes], template: SlotContext
    ) -> Iterable[ReuseSource]:
        """What memory and disk offer; quantised KV is good from the turning point on only."""
        free_from = self._memory.quantized_start
        for chain in chains:
            found = self._memory.match(chain, tokens, None)
            for option in reuse_plan.stored(found, template.is_sliceable):
                if option.source is KVSource.DISK and not self._memory.spec.disk.enabled:
                    continue
                yield replace(option, free_from=free_from) if template.is_sliceable else option
            free_from = 0

    def _clues(
        self, request: Request, chains: Iterable[BlockHashes], before: Sequence[int]
    ) -> MissContext:
        name = request.agent or request.display_name
        is_new = name is not None and self._last(request) is None
        return MissContext(
            n_prompt=len(request.tokens),
            is_new=request.is_first_turn and self._last(request) is None,
            block_size=self._memory.spec.block_size,
            is_foreign=is_new and self._is_foreign(name or ""),
            n_previous=len(before),
            n_common=common_prefix(before, request.tokens),
            n_evicted=max(prefix_match.was_known(self._memory.index, c.keys) for c in chains),
        )

    def _before(self, request: Request, slots: Sequence[SlotContext]) -> Sequence[int]:
        """The prompt to which this one is compared: the agent's last, else the nearest live one."""
        last = self._last(request)
        if last is not None:
            return last.tokens
        live = [c.tokens[: c.n_prompt] for c in slots if c.salt == request.salt and len(c)]
        return max(live, key=lambda tokens: common_prefix(tokens, request.tokens), default=())

    def _last(self, request: Request) -> LastPrompt | None:
        """The last prompt of who asks; where it differs is told to nobody under another salt."""
        last = self._prompts.get(request.agent or request.display_name or "")
        return last if last is not None and last.salt == request.salt else None


def _told(miss: CacheMiss | None, before: Sequence[int]) -> CacheMiss | None:
    """The miss, with what the prompt would have had to go on with."""
    if miss is None or miss.at is None:
        return miss
    return replace(miss, instead=tuple(before[miss.at : miss.at + SHOWN]))


def _conversation(request: Request, chain: BlockHashes) -> str:
    """Who speaks: the agent, the client's hint, else how the prompt goes on after its head."""
    head = request.checkpoint_positions[0] if request.checkpoint_positions else 0
    told = block_hash.hash_at(chain, request.tokens, min(len(request.tokens), head + FIRST_WORDS))
    return request.agent or request.session_hint or told.hex()


def _live(
    context: SlotContext, source: KVSource, slot: int, request: Request, block: int
) -> ReuseSource:
    """A live context as a source; from other slots whole blocks, where it can be cut."""
    n_common = 0
    is_usable = source is KVSource.SLOT or context.is_storable
    if context.salt == request.salt and is_usable:
        n_common = common_prefix(context.tokens, request.tokens)
    if context.is_cuttable:
        covered = min(n_common, len(request.tokens) - 1)
        return ReuseSource(
            source, covered - covered % block, free_from=context.min_rewind, slot=slot
        )
    states = [RestorePoint(c.position) for c in context.checkpoints]
    return reuse_plan.live(source, slot, n_common, [*states, RestorePoint(len(context))])
