"""Prefix lookup: cached tokens of a prompt, and the miss reason."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.commands import AgentKVLocation
from mlxstack.core.engine_events import CacheMiss, KVSource
from mlxstack.core.image import FIRST_VIRTUAL
from mlxstack.core.prompt_tokens import ImageRange, KeptTokens, TokenRow, kept, reuse_cut
from mlxstack.core.request import Request
from mlxstack.engine.kv.prefix_cache import PrefixCache
from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.slots.request_state import RequestState
from mlxstack.policy.kv import block_hash, prefix_index, reuse_plan
from mlxstack.policy.kv.block_hash import BlockHashes
from mlxstack.policy.kv.prefix_index import RestorePoint, StorageTier, common_tokens
from mlxstack.policy.kv.reuse_plan import MissContext, ReusePlan, ReuseSource
from mlxstack.policy.kv.shared_prefixes import SharedPrefixes

MAX_AGENTS = 512
MAX_PROMPT_BYTES = 64 << 20
"""Bytes of all last prompts; a small KV budget gives them less."""

PROMPT_SHARE = 32
"""Maximum KV budget of the last prompts: 1 / PROMPT_SHARE."""

KEY_BYTES = 80
"""A block key in a chain: 32 bytes, and what Python adds."""

FIRST_WORDS = 48
"""Tokens after the head that identify a conversation without a name."""

SHOWN = 24
"""Tokens of the earlier prompt that explain a miss."""


class LastPrompt(Struct, frozen=True):
    """Last prompt of a conversation as uint32, its images and block chains."""

    tokens: "array[int]"
    images: tuple[ImageRange, ...]
    salt: str
    chains: tuple[BlockHashes, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes that it occupies."""
        n_keys = sum(len(chain.keys) for chain in self.chains)
        return self.tokens.itemsize * len(self.tokens) + KEY_BYTES * n_keys


class PrefixLookup:
    """Looks up reusable KV of prompts. Runs on the MLX thread.

    `shared_prefixes` observes every prompt. `is_foreign` tells whether an agent has KV, but of
    other models only.
    """

    def __init__(
        self,
        prefix_cache: PrefixCache,
        shared_prefixes: SharedPrefixes,
        is_foreign: Callable[[str], bool],
    ) -> None:
        self._prefix_cache = prefix_cache
        self._shared_prefixes = shared_prefixes
        self._is_foreign = is_foreign
        self._prompts: OrderedDict[str, LastPrompt] = OrderedDict()
        self._most_bytes = min(MAX_PROMPT_BYTES, prefix_cache.budget // PROMPT_SHARE)
        self.n_bytes = 0
        """Bytes of all last prompts, a part of the KV budget."""
        self._hashed: tuple[Request, tuple[BlockHashes, ...]] | None = None

    def find(
        self, request: Request, slots: Sequence[SlotContext], slot: int, *, may_read: bool = True
    ) -> tuple[ReusePlan, CacheMiss | None]:
        """Best restore point of the prompt, and the miss.

        `slots` are contexts, also of no slot at the end. KV on disk counts if it `may_read`. A
        request that drops its KV copies also what is in its own slot.
        """
        chains = self._chains(request)
        before = self._before(request, slots)
        clues = self._clues(request, chains, before)
        if not request.use_cache:
            return ReusePlan(), reuse_plan.explain_miss(
                ReusePlan(), (), replace(clues, is_enabled=False)
            )
        own = KVSource.FORK if request.drops_kv else KVSource.SLOT
        options = [_live_source(slots[slot], own, slot, request)]
        if self._prefix_cache.spec.enabled:
            nonempty = (i for i in range(len(slots)) if i != slot and len(slots[i]))
            options += [_live_source(slots[i], KVSource.FORK, i, request) for i in nonempty]
            stored = self._stored(request, chains, slots[slot])
            options += [
                option for option in stored if may_read or option.source is not KVSource.DISK
            ]
        plan = reuse_plan.plan(len(request.tokens), options, request.images)
        return plan, _told(reuse_plan.explain_miss(plan, options, clues), before)

    def kept(self, row: TokenRow, salt: str, template: SlotContext) -> ReusePlan:
        """Longest cached prefix of these tokens beside the slots."""
        chains = self._prefix_cache.chains(row, salt)
        return reuse_plan.plan(len(row.tokens) + 1, tuple(self._stored(row, chains, template)))

    def remember(self, request: Request) -> None:
        """Record an assigned prompt, for shared prefixes and later misses."""
        chains = self._chains(request)
        self._shared_prefixes.observe(_conversation(request, chains[0]), chains[0], request)
        name = request.display_name
        if name is None:
            return
        self.forget(name)
        last = kept(request, 0, len(request.tokens))
        tokens = array("I", last.tokens)
        self._prompts[name] = LastPrompt(tokens, last.images, request.salt, chains)
        self.n_bytes += self._prompts[name].n_bytes
        while len(self._prompts) > MAX_AGENTS or self._is_over():
            self.forget(next(iter(self._prompts)))

    def locate(self, agent: str) -> AgentKVLocation:
        """Tier of the last prompt of this agent outside the slots."""
        nodes = [self._prefix_cache.index.nodes[key] for key in self.keys_of(agent)]
        return AgentKVLocation(
            agent=agent,
            n_tokens=max((prefix_index.end_of(node.record) for node in nodes), default=0),
            memory_bytes=sum(n.record.n_bytes for n in nodes if StorageTier.MEMORY in n.tiers),
            disk_bytes=sum(n.record.n_bytes for n in nodes if StorageTier.DISK in n.tiers),
        )

    def last(self, agent: str) -> LastPrompt | None:
        """The last prompt of this agent."""
        return self._prompts.get(agent)

    def keys_of(self, agent: str) -> tuple[str, ...]:
        """Records of an agent's longest known last prompt, root first."""
        last = self._prompts.get(agent)
        if last is None:
            return ()
        matches = [self._prefix_cache.match(chain, last, None) for chain in last.chains]
        longest = max(matches, key=lambda match: match.covered)
        checkpoints = (point.checkpoint for point in longest.checkpoints if point.checkpoint)
        return (*(step.key for step in longest.path), *checkpoints)

    def sharing(self, keys: Sequence[str]) -> tuple[str, ...]:
        """Agents whose last prompt begins with these records, the latest first. O(agents)."""
        nodes = (self._prefix_cache.index.nodes.get(key) for key in keys)
        records = [node.record for node in nodes if node is not None]
        held = [
            entry
            for entry in records
            if isinstance(entry, prefix_index.SegmentMeta) and entry.blocks
        ]
        if not held:
            return ()
        place = held[-1].end // self._prefix_cache.spec.block_size - 1
        block = held[-1].blocks[-1]
        return tuple(
            name
            for name, entry in reversed(self._prompts.items())
            if any(chain.keys[place : place + 1] == (block,) for chain in entry.chains)
        )

    def beginning(self, keys: Sequence[str]) -> tuple[int, ...]:
        """First text tokens of the prefix with these records; empty if unknown.

        Files do not hold tokens: after a restart they are those of a learned prefix, or of a prompt
        that begins with it.
        """
        node = self._prefix_cache.index.nodes.get(keys[0]) if keys else None
        if node is None or not isinstance(node.record, prefix_index.SegmentMeta):
            return ()
        tokens = self._prefix_cache.parked_tokens(keys[0])
        if not tokens and node.record.blocks:
            tokens = self._tokens_of_block(node.record.blocks[0])
        return tuple(token for token in tokens if token < FIRST_VIRTUAL)

    def _tokens_of_block(self, block: bytes) -> Sequence[int]:
        """Tokens that begin with this first block of a prompt. O(agents)."""
        size = self._prefix_cache.spec.block_size
        for prompt in reversed(self._prompts.values()):
            if any(chain.keys[:1] == (block,) for chain in prompt.chains):
                return prompt.tokens[:size]
        for learned in self._shared_prefixes.learned:
            row = KeptTokens(learned.tokens[:size])
            if any(chain.keys[:1] == (block,) for chain in self._prefix_cache.chains(row, "")):
                return row.tokens
        return ()

    def forget(self, agent: str) -> None:
        """Forget the agent's last prompt as reference for misses."""
        if last := self._prompts.pop(agent, None):
            self.n_bytes -= last.n_bytes

    def _is_over(self) -> bool:
        """Whether the last prompts exceed their bytes; one always stays."""
        return len(self._prompts) > 1 and self.n_bytes > self._most_bytes

    def _chains(self, request: Request) -> tuple[BlockHashes, ...]:
        """Block hashes of a request, computed once."""
        if self._hashed is None or self._hashed[0] is not request:
            self._hashed = request, self._prefix_cache.chains(request, request.salt)
        return self._hashed[1]

    def _stored(
        self, row: TokenRow, chains: Iterable[BlockHashes], template: SlotContext
    ) -> Iterable[ReuseSource]:
        """Reuse sources in memory and on disk; quantized KV only beyond `quantized_start`."""
        free_from = self._prefix_cache.quantized_start
        for chain in chains:
            match = self._prefix_cache.match(chain, row, None)
            if template.is_sliceable:
                match = self._prefix_cache.match_in_block(match, chain, row)
            for option in reuse_plan.stored(match, template.is_sliceable):
                if option.source is KVSource.DISK and not self._prefix_cache.spec.disk.enabled:
                    continue
                yield replace(option, free_from=free_from) if template.is_sliceable else option
            free_from = 0

    def _clues(
        self, request: Request, chains: Iterable[BlockHashes], before: TokenRow
    ) -> MissContext:
        is_unknown = self._last(request) is None
        return MissContext(
            n_prompt=len(request.tokens),
            is_new=request.is_first_turn and is_unknown,
            block_size=self._prefix_cache.spec.block_size,
            # Only explicit agents have saved KV.
            is_foreign=is_unknown and request.agent is not None and self._is_foreign(request.agent),
            n_previous=len(before.tokens),
            n_common=common_tokens(before, request),
            is_guess=is_unknown,
            n_evicted=max(prefix_index.was_known(self._prefix_cache.index, c.keys) for c in chains),
        )

    def _before(self, request: Request, slots: Sequence[SlotContext]) -> TokenRow:
        """Reference prompt: the agent's last, else the nearest live one."""
        last = self._last(request)
        if last is not None:
            return last
        prompts = [kept(c, 0, c.n_prompt) for c in slots if c.salt == request.salt and len(c)]
        return max(prompts, key=lambda row: common_tokens(row, request), default=KeptTokens(()))

    def _last(self, request: Request) -> LastPrompt | None:
        """Last prompt of the requesting agent; never disclosed under another salt."""
        last = self._prompts.get(request.display_name or "")
        if last is not None and last.salt == request.salt:
            return last
        return None


def _told(miss: CacheMiss | None, before: TokenRow) -> CacheMiss | None:
    """Cache miss with the tokens of the cached continuation."""
    if miss is None or miss.at is None:
        return miss
    tokens = before.tokens[miss.at : miss.at + SHOWN]
    return replace(miss, instead=tuple(token for token in tokens if token < FIRST_VIRTUAL))


def _conversation(request: Request, chain: BlockHashes) -> str:
    """Conversation by agent, session hint, else first tokens."""
    head = request.checkpoint_positions[0] if request.checkpoint_positions else 0
    n_named = min(len(request.tokens), head + FIRST_WORDS)
    head_hash = block_hash.hash_at(chain, request, n_named)
    return request.agent or request.caller.session_hint or head_hash.hex()


def _live_source(
    context: SlotContext, source: KVSource, slot: int, request: Request
) -> ReuseSource:
    """Reuse source of a live context, up to its cuttable end."""
    n_common = 0
    is_usable = source is KVSource.SLOT or context.is_storable
    if context.salt == request.salt and is_usable:
        n_common = common_tokens(context, request)
    if context.is_cuttable:
        covered = min(n_common, len(request.tokens) - 1)
        return ReuseSource(source, covered, free_from=context.min_rewind, slot=slot)
    states = (*(RestorePoint(c.position) for c in context.checkpoints), RestorePoint(len(context)))
    return ReuseSource(source, n_common, free_from=None, states=states, slot=slot)


class PrefixOverlapCache:
    """Caches prefix comparisons; a changed context has another version."""

    def __init__(
        self, slots: Sequence[SlotContext], requests: Mapping[str, RequestState], block: int
    ) -> None:
        self._slots = slots
        self._requests = requests
        self._block = block
        self._promises: dict[tuple[str, str], int] = {}
        self._known: dict[tuple[str, int, int], int] = {}

    def shared(self, request_id: str, slot: int) -> int:
        """First tokens of the prompt in the slot; 0 under another salt."""
        request = self._requests[request_id].request
        context = self._slots[slot]
        if request.salt != context.salt:
            return 0
        key = (request.id, slot, context.version)
        if key not in self._known:
            self._known[key] = common_tokens(context, request)
        return self._known[key]

    def promised(self, request_id: str, other_id: str) -> int:
        """Prompt tokens of another request's prefill, if worth a wait.

        A context that can be cut is forked to the token, any other one at its checkpoints.
        """
        request = self._requests[request_id].request
        computed = self._requests[other_id].request
        if request.salt != computed.salt or not (request.use_cache and computed.use_cache):
            return 0
        if computed.drops_kv:
            return 0
        key = (request.id, computed.id)
        if key not in self._promises:
            n_common = common_tokens(request, computed)
            n_common = min(n_common, len(request.tokens) - 1, len(computed.tokens) - 1)
            if self._slots[0].is_sliceable:
                position = reuse_cut(request.images, n_common) if request.images else n_common
            else:
                position = max(
                    (cut for cut in computed.checkpoint_positions if cut <= n_common), default=0
                )
            n_shared = max(self.shared(request.id, i) for i in range(len(self._slots)))
            self._promises[key] = position if position >= n_shared + self._block else 0
        return self._promises[key]

    def forget(self, request_id: str) -> None:
        """Drop the comparisons of a request that waits no longer."""
        self._known = {key: n for key, n in self._known.items() if key[0] != request_id}
        self._promises = {key: n for key, n in self._promises.items() if request_id != key[0]}
