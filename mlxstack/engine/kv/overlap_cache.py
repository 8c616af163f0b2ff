"""How much of a waiting prompt each slot's context shares, compared once per change."""

from collections.abc import Mapping, Sequence

from mlxstack.engine.kv.slot_context import SlotContext
from mlxstack.engine.request_state import RequestState
from mlxstack.policy.common_prefix import common_prefix


class PrefixOverlapCache:
    """Remembers comparisons; a context that changed has another version."""

    def __init__(
        self, slots: Sequence[SlotContext], live: Mapping[str, RequestState], block: int
    ) -> None:
        self._slots = slots
        self._live = live
        self._block = block
        self._promises: dict[tuple[str, str], int] = {}
        self._known: dict[tuple[str, int, int], int] = {}

    def shared(self, request_id: str, slot: int) -> int:
        """First tokens of the prompt that stand in the slot; 0 under another salt."""
        request, context = self._live[request_id].request, self._slots[slot]
        if request.salt != context.salt:
            return 0
        key = (request.id, slot, context.version)
        if key not in self._known:
            self._known[key] = common_prefix(context.tokens, request.tokens)
        return self._known[key]

    def promised(self, request_id: str, other_id: str) -> int:
        """Up to where computing the other one computes this ask too, if that is worth a wait.

        A context that can be cut is forked in whole blocks, any other one at its next cuts.
        """
        request, other = self._live[request_id].request, self._live[other_id].request
        if request.salt != other.salt or not (request.use_cache and other.use_cache):
            return 0
        key = (request.id, other.id)
        if key not in self._promises:
            n_common = common_prefix(request.tokens, other.tokens)
            n_common = min(n_common, len(request.tokens) - 1, len(other.tokens) - 1)
            if self._slots[0].is_sliceable:
                position = n_common - n_common % self._block
            else:
                position = max(
                    (cut for cut in other.checkpoint_positions if cut <= n_common), default=0
                )
            known = max(self.shared(request.id, i) for i in range(len(self._slots)))
            self._promises[key] = position if position >= known + self._block else 0
        return self._promises[key]

    def forget(self, request_id: str) -> None:
        """The ask waits no longer."""
        self._known = {key: n for key, n in self._known.items() if key[0] != request_id}
        self._promises = {key: n for key, n in self._promises.items() if request_id != key[0]}
