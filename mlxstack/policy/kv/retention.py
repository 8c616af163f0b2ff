"""Retention: agents' claims on their newest state, and named prefixes."""

from collections.abc import Iterable

from msgspec import Struct

from mlxstack.core.status import PrefixView
from mlxstack.policy.kv.prefix_index import (
    IndexEntry,
    PathStep,
    PrefixIndex,
    SegmentMeta,
    end_of,
    last_checkpoint,
    reach,
)


class PinnedPrefixName(Struct, frozen=True):
    """Named prefix: its segments, and the last checkpoint on them.

    A name given by a person pins its records; a learned one only protects them.
    """

    name: str
    keys: tuple[str, ...]
    n_tokens: int
    since: float
    is_learned: bool = False


class Retention:
    """Claims of agents and names on records of one index.

    Changed together with the index. `names` are the named prefixes, oldest first.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._claims: dict[str, tuple[str, ...]] = {}
        self.names: dict[str, PinnedPrefixName] = {}

    @property
    def claims(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """Records of every agent's newest state."""
        return tuple(self._claims.items())

    def claim(self, agent: str, leaf: str, checkpoint: str | None = None) -> None:
        """Claim the segment `leaf` as newest state; the older is superseded.

        What the new state shares with the old one, and what others claim, is not.
        """
        steps = reach(self._index, leaf, end_of(self._index.nodes[leaf].record))
        self.release(agent)
        self._claims[agent] = _keys(steps, checkpoint)
        for node in self._existing(self._claims[agent]):
            node.agents.add(agent)
            node.was_left = False

    def release(self, agent: str) -> None:
        """`agent` no longer claims anything; unknown agents are ignored."""
        for node in self._existing(self._claims.pop(agent, ())):
            node.agents.discard(agent)
            node.was_left = True

    def abandon(self, keys: Iterable[str], position: int) -> None:
        """Evict first whatever reaches beyond `position` on the path.

        A segment that holds `position` goes as a whole: a live context has its beginning.
        """
        for node in self._existing(keys):
            node.was_left |= end_of(node.record) > position

    def pin(self, name: PinnedPrefixName) -> None:
        """Pin the records of `name`, replacing an older one.

        A learned name only protects them.
        """
        self.unpin(name.name)
        self.names[name.name] = name
        for node in self._existing(name.keys):
            (node.soft_pins if name.is_learned else node.pins).add(name.name)

    def unpin(self, name: str) -> bool:
        """Unpin a named prefix; False for an unknown name."""
        pinned = self.names.pop(name, None)
        if pinned is None:
            return False
        for node in self._existing(pinned.keys):
            node.soft_pins.discard(name)
            node.pins.discard(name)
        return True

    def forget(self, key: str) -> None:
        """Drop a record whose content is gone from all names."""
        for node in self._existing((key,)):
            node.pins.clear()
            node.soft_pins.clear()

    def top(self, now: float, limit: int = 10) -> tuple[PrefixView, ...]:
        """At most `limit` prefixes by hits: the newest pins, then the most used. O(records).

        The `id` is the name, or the key of the last record without one; sharing is not known here.
        """
        named = [self._named_prefix(name, now) for name in self.names.values()]
        taken = {key for name in self.names.values() for key in name.keys}
        unnamed = [
            self._unnamed_prefix(key, now)
            for key, node in self._index.nodes.items()
            if key not in taken and node.hits and self._is_tip(node)
        ]
        pinned = [prefix for prefix in named if prefix.is_pinned]
        pinned.sort(key=lambda prefix: prefix.age_s)
        used = [prefix for prefix in named if not prefix.is_pinned] + unnamed
        used.sort(key=_by_use)
        return tuple(sorted((pinned + used)[:limit], key=_by_use))

    def known(self, key: str) -> PinnedPrefixName | None:
        """Records under the key of a `Prefix`; None without any."""
        if key in self.names:
            return self.names[key]
        node = self._index.nodes.get(key)
        if node is None or not isinstance(node.record, SegmentMeta):
            return None
        end = end_of(node.record)
        return PinnedPrefixName("", self.held(key, end), end, node.born_at)

    def held(self, leaf: str, n_tokens: int) -> tuple[str, ...]:
        """Keys needed to keep `n_tokens` of the path to `leaf`."""
        steps = reach(self._index, leaf, n_tokens)
        return _keys(steps, last_checkpoint(self._index, steps))

    def _existing(self, keys: Iterable[str]) -> list[IndexEntry]:
        return [self._index.nodes[key] for key in keys if key in self._index.nodes]

    def _is_tip(self, node: IndexEntry) -> bool:
        """Whether a segment was hit more often than anything that continues it."""
        if not isinstance(node.record, SegmentMeta):
            return False
        children = self._existing(node.children)
        return all(c.hits < node.hits for c in children if isinstance(c.record, SegmentMeta))

    def _named_prefix(self, name: PinnedPrefixName, now: float) -> PrefixView:
        nodes = self._existing(name.keys)
        return PrefixView(
            id=name.name,
            name=name.name,
            n_tokens=name.n_tokens,
            n_bytes=sum(node.record.n_bytes for node in nodes),
            n_hits=min((n.hits for n in nodes if isinstance(n.record, SegmentMeta)), default=0),
            age_s=now - name.since,
            is_pinned=not name.is_learned,
        )

    def _unnamed_prefix(self, key: str, now: float) -> PrefixView:
        node = self._index.nodes[key]
        steps = reach(self._index, key, end_of(node.record))
        return PrefixView(
            id=key,
            n_tokens=end_of(node.record),
            n_bytes=sum(step.n_bytes for step in steps),
            n_hits=node.hits,
            age_s=now - node.born_at,
            is_pinned=bool(node.pins),
        )


def _by_use(prefix: PrefixView) -> tuple[int, int, str]:
    return -prefix.n_hits, -prefix.n_tokens, prefix.name


def _keys(steps: Iterable[PathStep], checkpoint: str | None) -> tuple[str, ...]:
    keys = [step.key for step in steps]
    if checkpoint is not None:
        keys.append(checkpoint)
    return tuple(keys)
