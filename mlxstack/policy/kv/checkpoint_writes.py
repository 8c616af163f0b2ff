"""Checkpoint writes: which checkpoints of a context go to disk.

A token's KV is written once; a checkpoint is written whole, and superseded by the next one. During
a session one is due where the KV since the last one on disk has 1 / SHARE of its bytes. All of a
session and its end are at most 1 + SHARE of its KV, and three checkpoints more: 1.2 times the state
that it ends with, where its KV has the bytes of 24 checkpoints.
"""

from msgspec import Struct

SHARE = 0.125
"""Bytes of a session's checkpoints, in bytes of its KV."""

NEAR = 32
"""Tokens that are computed as fast as a checkpoint is read."""


class CheckpointSize(Struct, frozen=True):
    """Checkpoint of a context: position, and bytes of its arrays."""

    position: int
    n_bytes: int


class WrittenContext(Struct, frozen=True):
    """Context whose KV is on disk or about to be, and its checkpoints, ascending: one at least.

    `written` are positions of checkpoints of the same tokens on disk; a token adds `token_bytes` of
    KV, without layers that have checkpoints only. `n_prompt` tokens are its last prompt.
    """

    checkpoints: tuple[CheckpointSize, ...]
    written: frozenset[int]
    token_bytes: float
    n_prompt: int


def due(context: WrittenContext, *, is_leaving: bool) -> tuple[int, ...]:
    """Positions of the checkpoints to write now, ascending.

    The first one always: other conversations share it. Of a context that is leaving its slot also
    its end, and that of its prompt: a client may send the answer back in other tokens.
    """
    first, last = context.checkpoints[0], context.checkpoints[-1]
    turn = _turn_end(context)
    written = context.written
    wanted: set[int] = set()
    if not any(position <= first.position for position in written):
        wanted.add(first.position)
    if is_leaving:
        wanted |= {turn.position, last.position}
    elif _is_worth_it(turn, context, written | wanted):
        wanted.add(turn.position)
    return tuple(sorted(wanted - written))


def _turn_end(context: WrittenContext) -> CheckpointSize:
    """The first of the checkpoints at the end of the prompt: more prompts share it."""
    inside = [c for c in context.checkpoints if c.position <= context.n_prompt]
    if not inside:
        return context.checkpoints[-1]
    return next(c for c in inside if inside[-1].position - c.position <= NEAR)


def _is_worth_it(
    checkpoint: CheckpointSize, context: WrittenContext, written: frozenset[int]
) -> bool:
    """Whether the KV since the last checkpoint on disk is many times its bytes."""
    before = max(position for position in written if position <= checkpoint.position)
    n_bytes = (checkpoint.position - before) * context.token_bytes
    return n_bytes * SHARE >= checkpoint.n_bytes
