"""How much of a waiting prompt each slot's context shares, compared once per change."""

from collections.abc import Sequence

from mlxstack.core.ask import Ask
from mlxstack.engine.context import Context
from mlxstack.policy.prefix import common_prefix


class Matches:
    """Remembers comparisons; a context that changed has another version."""

    def __init__(self, slots: Sequence[Context]) -> None:
        self._slots = slots
        self._known: dict[tuple[str, int, int], int] = {}

    def shared(self, ask: Ask, slot: int) -> int:
        """First tokens of the prompt that stand in the slot; 0 under another salt."""
        context = self._slots[slot]
        if ask.salt != context.salt:
            return 0
        key = (ask.id, slot, context.version)
        if key not in self._known:
            self._known[key] = common_prefix(context.tokens, ask.tokens)
        return self._known[key]

    def forget(self, ask_id: str) -> None:
        """The ask waits no longer."""
        self._known = {key: n for key, n in self._known.items() if key[0] != ask_id}
