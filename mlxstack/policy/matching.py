"""Questions to the index: how much of a prompt is known, and along which path."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from mlxstack.policy.index import Index
from mlxstack.policy.records import (
    Checkpoint,
    Cut,
    Found,
    Match,
    Place,
    Segment,
    Step,
    Trail,
    end_of,
)


def match(
    index: Index, keys: Sequence[bytes], cuts: Iterable[Cut] = (), trail: Trail | None = None
) -> Match:
    """The longest known prefix of a prompt; changes nothing. O(log blocks + path + cuts).

    `keys` are the chain keys of its full blocks, `cuts` the positions between blocks where it
    hopes for a checkpoint, `trail` a context whose tokens the caller compared, which is good to
    the token.
    """
    n_known = bisect_left(keys, True, key=lambda block: block not in index.blocks)
    covered = n_known * index.block_size
    leaf = _nearest(index, keys[n_known - 1]) if n_known else None
    for cut in cuts:
        checkpoint = index.states.get(cut.state)
        if checkpoint is not None and cut.position > covered:
            covered, leaf = cut.position, index.nodes[checkpoint].record.parent
    if trail is not None and trail.leaf in index.nodes:
        upto = min(trail.n_common, end_of(index.nodes[trail.leaf].record))
        if upto > covered:
            covered, leaf = upto, trail.leaf
    path = reach(index, leaf, covered)
    return Match(covered, path, _checkpoints(index, path, keys[:n_known]))


def reach(index: Index, leaf: str | None, upto: int) -> tuple[Step, ...]:
    """The path from the root towards the segment `leaf`, cut at the position `upto`. O(path)."""
    steps: list[Step] = []
    while leaf is not None:
        node = index.nodes[leaf]
        record = node.record
        assert isinstance(record, Segment), f"{leaf} is no segment"
        if record.start < upto:
            upto = min(upto, record.end)
            is_parked = Place.MEMORY in node.places
            steps.append(Step(leaf, record.start, upto, record.n_bytes, is_parked))
            upto = record.start
        leaf = record.parent
    return tuple(reversed(steps))


def cut_path(path: tuple[Step, ...], position: int) -> tuple[Step, ...]:
    """The part of a path that covers the first `position` tokens."""
    return tuple(
        Step(step.key, step.start, min(step.upto, position), step.n_bytes, step.is_parked)
        for step in path
        if step.start < position
    )


def last_checkpoint(index: Index, path: tuple[Step, ...]) -> str | None:
    """The checkpoint nearest to the end of a path."""
    found = _checkpoints(index, path, ())
    return found[-1].key if found else None


def was_known(index: Index, keys: Sequence[bytes]) -> int:
    """Tokens of the prompt that are known, or were before an eviction not long ago."""
    known = bisect_left(
        keys, True, key=lambda block: block not in index.blocks and block not in index.forgotten
    )
    return known * index.block_size


def _nearest(index: Index, block: bytes) -> str:
    """A segment that ends this block, one in memory if there is any."""
    keys = index.blocks[block]
    parked = (key for key in keys if Place.MEMORY in index.nodes[key].places)
    return next(parked, next(iter(keys)))


def _checkpoints(index: Index, path: tuple[Step, ...], keys: Sequence[bytes]) -> tuple[Found, ...]:
    """Checkpoints on the path, and those that other branches took after the same blocks."""
    found = {index.states[block] for block in keys if block in index.states}
    for step in path:
        found.update(_checkpoints_of(index, step))
    return tuple(sorted((_found(index, key) for key in found), key=lambda f: f.position))


def _checkpoints_of(index: Index, step: Step) -> list[str]:
    children = ((key, index.nodes[key].record) for key in index.nodes[step.key].children)
    return [
        key
        for key, record in children
        if isinstance(record, Checkpoint) and record.position <= step.upto
    ]


def _found(index: Index, key: str) -> Found:
    node = index.nodes[key]
    is_parked = Place.MEMORY in node.places
    return Found(key, end_of(node.record), node.record.n_bytes, is_parked)
