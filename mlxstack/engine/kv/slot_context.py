"""Slot context: live caches, one per layer, and their exact tokens."""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten
from msgspec import Struct

from mlxstack.core.prompt_tokens import ImageRange, TokenRow, kept
from mlxstack.engine.model import cache_adapters
from mlxstack.engine.model.cache_adapters import CacheFactory, LayerState
from mlxstack.engine.model.runner import PassStart
from mlxstack.policy.kv.block_hash import BlockHashes
from mlxstack.policy.kv.prefix_index import KnownPrefix

MAX_CHECKPOINTS = 8

COUNT_EVERY = 64
"""Tokens between byte counts, each of which visits all layers."""

AT_ONCE = 64 << 20
"""Bytes of room after which a step makes no more: fresh memory takes time, and others decode."""


class CompanionContext(Protocol):
    """KV of another model for the same tokens, which goes where the slot's goes."""

    @property
    def n_bytes(self) -> int:
        """Bytes of its arrays."""

    def rewind(self, position: int) -> object:
        """Drop what follows the first `position` tokens."""

    def detach(self) -> None:
        """Share no buffers with the batch any more."""


class SharedArrays(Protocol):
    """KV of contexts that decode together, in common arrays."""

    @property
    def n_row_bytes(self) -> int:
        """Bytes for each context."""

    def dissolve(self) -> None:
        """Write the new tokens back to the contexts."""


class StateCheckpoint(Struct, frozen=True):
    """The stateful layers, in order, after exactly `position` tokens."""

    position: int
    states: tuple[LayerState, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of its arrays."""
        return sum(a.nbytes for f in self.states for a in f.arrays if a is not None)


class PromptLogits(Struct, frozen=True):
    """Logits (1, vocabulary) after the first `n_tokens` tokens."""

    n_tokens: int
    logits: mx.array


class KVSources(Struct, frozen=True, array_like=True):
    """Keys of KV for a context with room for `n_room` tokens."""

    segments: tuple[str, ...] = ()
    checkpoints: tuple[str, ...] = ()
    n_room: int = 0
    is_from_disk: bool = False


NO_SOURCES = KVSources()


class SlotContext:
    """Live KV of one slot, changed by the MLX thread only.

    `tokens[i]` is the token whose KV stands at position i; `images` are the ranges of the images
    that begin in them, ascending. `checkpoints` are ascending and lie
    within `tokens`; a context whose layers are all sliceable needs none. `salt` is the tenant of
    these tokens, `agent` the last explicit agent, `n_prompt` the length of its prompt.
    """

    def __init__(self, cache_factory: CacheFactory) -> None:
        self._cache_factory = cache_factory
        self._caches: list[Any] = cache_factory.make()
        self._lent_to: SharedArrays | None = None
        self.tokens: list[int] = []
        self.images: tuple[ImageRange, ...] = ()
        self.checkpoints: list[StateCheckpoint] = []
        self.version = 0
        self._counted: tuple[int, int] | None = None
        self.n_unreserved = 0
        """Bytes of room that is promised, and made in the next steps."""
        self._is_prefilled = False
        self.salt = ""
        self.agent: str | None = None
        self.n_prompt = 0
        self._leaf: str | None = None
        self._n_anchored = 0
        self.chain: BlockHashes | None = None
        """The block chain of its first tokens, as far as the memory has hashed them."""
        self.min_rewind = 0
        """Below this position only 0 can be reached: the KV there is no longer as when computed."""
        self.companion: CompanionContext | None = None
        """A context of another model: a beginning of these tokens and those fed next."""
        self._pass_start: PassStart | None = None
        self._prompt_logits: PromptLogits | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def caches(self) -> list[Any]:
        """The cache of each layer, with all tokens."""
        self.take_back()
        return self._caches

    @caches.setter
    def caches(self, caches: list[Any]) -> None:
        self.take_back()
        self._caches = caches
        self._counted = None

    @property
    def own_caches(self) -> list[Any]:
        """Caches of which shared arrays may hold the newest tokens."""
        return self._caches

    def take_back(self) -> None:
        """Take all tokens back from shared arrays."""
        if self._lent_to is not None:
            self._lent_to.dissolve()

    def lend(self, arrays: SharedArrays) -> None:
        """Let shared arrays hold the tokens to come."""
        self._lent_to = arrays

    def reclaim(self) -> None:
        """No shared arrays hold tokens any more."""
        self._lent_to = self._counted = None

    @property
    def leaves(self) -> list[Any]:
        """Every layer's cache, lists of caches opened up."""
        return list(cache_adapters.leaves(self.caches))

    @property
    def _own_leaves(self) -> list[Any]:
        return list(cache_adapters.leaves(self._caches))

    @property
    def is_sliceable(self) -> bool:
        """Whether every layer can be cut anywhere, now and later."""
        return self._cache_factory.can_copy and all(
            cache_adapters.is_sliceable(leaf) for leaf in self._own_leaves
        )

    @property
    def is_storable(self) -> bool:
        """Whether every layer's cache can be stored and rebuilt."""
        return self._cache_factory.can_copy and all(
            cache_adapters.is_sliceable(leaf) or cache_adapters.is_stateful(leaf)
            for leaf in self._own_leaves
        )

    @property
    def n_bytes(self) -> int:
        """Bytes of caches, checkpoints, logits and companion, whether or not shared elsewhere."""
        checkpoints = sum(checkpoint.n_bytes for checkpoint in self.checkpoints)
        logits = self._prompt_logits.logits.nbytes if self._prompt_logits is not None else 0
        return self.cache_bytes + checkpoints + logits + self.companion_bytes

    @property
    def companion_bytes(self) -> int:
        """Bytes of the companion."""
        return 0 if self.companion is None else self.companion.n_bytes

    @property
    def cache_bytes(self) -> int:
        """Bytes of caches and shared arrays, recounted every few tokens."""
        part = -(-len(self.tokens) // COUNT_EVERY)
        if self._counted is None or self._counted[0] != part:
            self._counted = part, sum(cache_adapters.n_bytes(leaf) for leaf in self._own_leaves)
        return self._counted[1] + (self._lent_to.n_row_bytes if self._lent_to is not None else 0)

    def assign(self, salt: str, agent: str | None, n_prompt: int = 0) -> None:
        """Set tenant, agent and the prompt's length."""
        self.salt = salt
        self.agent = agent
        self.n_prompt = n_prompt

    def clear(self) -> None:
        """Forget everything."""
        self.caches = self._cache_factory.make()
        self.tokens = []
        self.images = ()
        self.chain = None
        self.version += 1
        self.checkpoints = []
        self.assign("", None)
        self._leaf = None
        self._n_anchored = 0
        self.min_rewind = 0
        self.companion = self._pass_start = self._prompt_logits = None
        self.n_unreserved = 0

    @property
    def quantized_start(self) -> int:
        """Position of KV quantization; 0 for never, or from the start."""
        return self._cache_factory.quantized_start

    def extend(self, tokens: Sequence[int], images: tuple[ImageRange, ...] = ()) -> None:
        """Note tokens whose KV was just appended, and images that begin there."""
        self.tokens.extend(tokens)
        self.images += images
        self.version += 1
        if self._is_prefilled or len(tokens) > 1:
            # A window holds more than its size after a prefill chunk, until the next token.
            self._counted, self._is_prefilled = None, len(tokens) > 1
        self.quantize_if_due()

    def extend_to(self, row: TokenRow, end: int) -> None:
        """Note the next tokens of a row, up to `end`, whose KV was just appended."""
        part = kept(row, len(self.tokens), end)
        self.extend(part.tokens, part.images)

    def keep_logits(self, n_tokens: int, logits: mx.array) -> None:
        """Keep the logits (1, vocabulary) after the prompt of `n_tokens`."""
        self._prompt_logits = PromptLogits(n_tokens, logits)

    def logits_after(self, tokens: Sequence[int]) -> mx.array | None:
        """Logits after these tokens, if kept and the context can end there.

        `tokens` but for the last one are known to be the first of the context.
        """
        prompt_logits = self._prompt_logits
        n = len(tokens)
        if (
            prompt_logits is None
            or prompt_logits.n_tokens != n
            or self.tokens[n - 1 : n] != [tokens[-1]]
        ):
            return None
        return prompt_logits.logits if self.rewind_target(n) == n else None

    def begin_proposal(self, n_tokens: int) -> None:
        """Let `end_proposal` drop the last tokens of the next pass.

        The pass has `n_tokens`.
        """
        self._pass_start = PassStart.of(self.caches, n_tokens)

    @property
    def is_in_proposal(self) -> bool:
        """Whether `end_proposal` is still to come."""
        return self._pass_start is not None

    def end_proposal(self, *tokens: int) -> bool:
        """Keep the first tokens of the pass, which are these.

        False when they have to be fed again: recurrent state can only go back to the start.
        """
        assert self._pass_start is not None
        start = self._pass_start
        self._pass_start = None
        is_kept = bool(start.roll_back(len(tokens)))
        if is_kept:
            self.extend(tokens)
        return is_kept

    @property
    def is_cuttable(self) -> bool:
        """Whether the last tokens can be dropped, down to the floor."""
        return self._cache_factory.can_copy and all(
            cache_adapters.can_cut(leaf) for leaf in self._own_leaves
        )

    def set_parent_segment(self, leaf: str) -> None:
        """Set segment `leaf` as parent of all current tokens."""
        self._leaf = leaf
        self._n_anchored = len(self.tokens)

    def parent_segment(self) -> KnownPrefix | None:
        """Last parent segment, and how many tokens still agree with it."""
        if self._leaf and self._n_anchored:
            return KnownPrefix(self._leaf, self._n_anchored)
        return None

    def new_empty(self, n_tokens: int = 0) -> "SlotContext":
        """Empty context of the same model, with caches for `n_tokens`."""
        fresh = SlotContext(self._cache_factory)
        fresh.caches = self._cache_factory.make(n_tokens)
        return fresh

    def take_over(self, source: "SlotContext") -> None:
        """Take over everything of a context that is not used any more."""
        self.caches = source.caches
        self.chain = source.chain
        self.tokens = source.tokens
        self.images = source.images
        self.checkpoints = source.checkpoints
        self.agent = source.agent
        self.n_prompt = source.n_prompt
        self._leaf = source._leaf
        self._n_anchored = source._n_anchored
        self.salt = source.salt
        self.min_rewind = source.min_rewind
        self.companion = source.companion
        self._prompt_logits = source._prompt_logits
        self.version += 1

    def quantize_if_due(self) -> None:
        """Quantize the KV once `quantized_start` is reached."""
        due = self._cache_factory.quantized_start
        if due and not self.min_rewind and len(self.tokens) >= due:
            self.caches = self._cache_factory.quantize(self.caches)
            self.evaluate()
            self._mark_min_rewind()
            # The segments it had are of 16-bit KV: nothing quantized may continue them.
            self._leaf = None
            self._n_anchored = 0

    def room(self, n_tokens: int) -> int:
        """Number of these tokens whose room can be reserved now.

        Below `quantized_start` only up to it: the rest is quantized, and smaller.
        """
        due = self.quantized_start
        if due and not self.min_rewind:
            return min(n_tokens, due)
        return n_tokens

    def reserve(self, n_tokens: int) -> None:
        """Reserve `n_tokens` in nonempty full-attention layers, some layers at each call."""
        most = self.room(n_tokens)
        n_made = 0
        missing = [(leaf, cache_adapters.missing_bytes(leaf, most)) for leaf in self.leaves]
        for leaf, n_bytes in missing:
            if n_bytes and n_made < AT_ONCE:
                cache_adapters.reserve(leaf, most)
                n_made += n_bytes
                self._counted = None
        self.n_unreserved = sum(n_bytes for _, n_bytes in missing) - n_made

    def rewind_target(self, position: int) -> int:
        """Target of `rewind(position)`: the last restorable point up to it."""
        position = min(position, len(self.tokens))
        if position == len(self.tokens):
            return position
        if position < self.min_rewind:
            return 0
        if self.is_cuttable:
            return position
        return max((c.position for c in self.checkpoints if c.position <= position), default=0)

    def rewind(self, position: int) -> int:
        """Drop the last tokens down to `rewind_target(position)`, which is returned."""
        position = self.rewind_target(position)
        if self._prompt_logits is not None and position < self._prompt_logits.n_tokens:
            self._prompt_logits = None
        if self.companion is not None:
            self.companion.rewind(position)
        if position == len(self.tokens):
            return position
        if position == 0:
            self.clear()
            return 0
        checkpoint = next((c for c in self.checkpoints if c.position == position), None)
        is_cut = self.is_cuttable
        for leaf in self.leaves:
            if is_cut or cache_adapters.is_sliceable(leaf):
                leaf.trim(len(self.tokens) - position)
        if not is_cut and checkpoint is not None:
            self._restore_state(checkpoint)
        del self.tokens[position:]
        self.images = tuple(image for image in self.images if image.start < position)
        self.chain = None
        self._counted = None
        self.version += 1
        self.checkpoints = [c for c in self.checkpoints if c.position <= position]
        self._n_anchored = min(self._n_anchored, position)
        return position

    def checkpoint(self, spared: int = 0) -> None:
        """Checkpoint the stateful layers; of too many, drop the second.

        The checkpoint at position `spared` is never the one that goes.
        """
        if self.is_sliceable or not self.is_storable:
            return
        if self.checkpoints and self.checkpoints[-1].position == len(self.tokens):
            return
        frozen = tuple(
            cache_adapters.snapshot_state(leaf)
            for leaf in self.leaves
            if cache_adapters.is_stateful(leaf)
        )
        mx.eval([a for f in frozen for a in f.arrays if a is not None])
        self.checkpoints.append(StateCheckpoint(len(self.tokens), frozen))
        if len(self.checkpoints) > MAX_CHECKPOINTS:
            del self.checkpoints[2 if self.checkpoints[1].position == spared else 1]

    def load(
        self,
        row: TokenRow,
        parts: Sequence[Sequence[mx.array]],
        checkpoints: Sequence[StateCheckpoint],
        sources: KVSources = NO_SOURCES,
    ) -> None:
        """Load the tokens of `row`; `parts[i]` belong to the i-th sliceable layer.

        They have the capacity of `cache_adapters.with_room`. The last checkpoint must stand at the
        end when a layer is stateful. `sources` tell where the same lies elsewhere.
        """
        self.clear()
        n_tokens = len(row.tokens)
        self.caches = self._cache_factory.make(n_tokens)
        self._counted = None
        sliceable = [leaf for leaf in self.leaves if cache_adapters.is_sliceable(leaf)]
        for leaf, whole in zip(sliceable, parts, strict=True):
            cache_adapters.rebuild(leaf, whole, n_tokens)
        if checkpoints:
            self._restore_state(checkpoints[-1])
        self.tokens = list(row.tokens)
        self.images = kept(row, 0, n_tokens).images
        self.checkpoints = list(checkpoints)
        self._mark_min_rewind()
        self.evaluate()

    def fork_from(self, source: "SlotContext", position: int, n_room: int = 0) -> int:
        """Become a copy of the first `other.rewind_target(position)` tokens of another context.

        There is room for `n_room` tokens.
        """
        assert source.is_storable, "a context of unknown caches cannot be copied"
        position = source.rewind_target(position)
        if position == 0:
            self.clear()
            return 0
        end = position
        if not source.is_sliceable and all(c.position != position for c in source.checkpoints):
            source.checkpoint()
            end = len(source.tokens)
        sliceable = [leaf for leaf in source.leaves if cache_adapters.is_sliceable(leaf)]
        spans = [cache_adapters.span(leaf, 0, end) for leaf in sliceable]
        n_room = self.room(n_room)
        self.load(
            kept(source, 0, end),
            [cache_adapters.joined([span], n_room) for span in spans],
            [c for c in source.checkpoints if c.position <= end],
        )
        self.salt = source.salt
        self._leaf, self._n_anchored = source._leaf, min(source._n_anchored, len(self.tokens))
        return self.rewind(position)

    def detach(self) -> None:
        """Share no buffers with the batch any more, and need no more room."""
        self.n_unreserved = 0
        for leaf in self.leaves:
            cache_adapters.detach(leaf)
        self.evaluate()
        if self.companion is not None:
            self.companion.detach()

    def evaluate(self) -> None:
        """Compute everything that is still lazy in the caches."""
        leaves = [leaf_state for leaf in self.leaves for _, leaf_state in tree_flatten(leaf.state)]
        mx.eval([leaf_state for leaf_state in leaves if isinstance(leaf_state, mx.array)])

    def _mark_min_rewind(self) -> None:
        due = self._cache_factory.quantized_start
        self.min_rewind = due if len(self.tokens) >= due else 0
        self.checkpoints = [c for c in self.checkpoints if c.position >= self.min_rewind]

    def _restore_state(self, checkpoint: StateCheckpoint) -> None:
        stateful = [leaf for leaf in self.leaves if cache_adapters.is_stateful(leaf)]
        for leaf, frozen in zip(stateful, checkpoint.states, strict=True):
            cache_adapters.restore_state(leaf, frozen)
