"""Division of one machine's memory between its running services."""

from collections.abc import Mapping, Sequence

from msgspec import Struct


class MemoryClaim(Struct, frozen=True):
    """Bytes that a service takes: `fixed` beside KV, `kv` of all slots full.

    `share` is a fixed KV budget; None is `auto`, which also gets a part of what is left.
    """

    name: str
    fixed: int
    kv: int = 0
    share: int | None = None

    @property
    def least(self) -> int:
        """Bytes without a part of what is left."""
        return self.fixed + (self.kv if self.share is None else self.share)


def kv_budgets(claims: Sequence[MemoryClaim], ceiling: int) -> dict[str, int]:
    """KV budget of each service; all bytes together stay within `ceiling`.

    A fixed share is taken as it is. The others have room for all of their slots and equal parts of
    the rest; where even the slots do not fit, they get less in proportion.
    """
    budgets = {claim.name: claim.share for claim in claims if claim.share is not None}
    growing = [claim for claim in claims if claim.share is None]
    free = max(0, ceiling - sum(claim.fixed for claim in claims) - sum(budgets.values()))
    claimed = sum(claim.kv for claim in growing)
    spare = free - claimed
    for claim in growing:
        if spare >= 0:
            budgets[claim.name] = claim.kv + spare // len(growing)
        else:
            budgets[claim.name] = free * claim.kv // claimed
    return budgets


def free_beside(
    own: MemoryClaim, neighbors: Sequence[MemoryClaim], grants: Mapping[str, int], ceiling: int
) -> int:
    """Bytes for KV of `own`; negative until others release KV.

    A service without a grant has no model in memory.
    """
    taken = sum(claim.fixed + grants[claim.name] for claim in neighbors if claim.name in grants)
    return ceiling - own.fixed - taken


def granted(
    own: MemoryClaim, neighbors: Sequence[MemoryClaim], grants: Mapping[str, int], ceiling: int
) -> int:
    """KV bytes that `own` may take now: its budget, within what is free.

    A budget that falls is followed at once, and one that grows once the room is free: all bytes
    together stay within `ceiling` while services come and go.
    """
    budget = kv_budgets((own, *neighbors), ceiling)[own.name]
    return max(0, min(budget, free_beside(own, neighbors, grants, ceiling)))
