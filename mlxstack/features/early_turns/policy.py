"""Early turns: expected next prompts, computed in chunks in idle slots."""

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.policy.scheduling.chunked_prefill import PrefillPolicy, ThroughputModel, chunk_size
from mlxstack.policy.scheduling.scheduler import is_quiet
from mlxstack.policy.scheduling.scheduler_state import SchedulerState, Slot

REST_STEPS = 200
"""Decode steps between two chunks.

Their stalls are half a percent of the gaps, so that the 99th percentile hardly moves.
"""


class EarlyTurn(Struct, frozen=True):
    """Expected next prompt, without output, of an idle slot's conversation."""

    slot: int
    n_prompt: int
    position: int | None = None
    """Tokens in KV; None until the cached ones were looked up."""


class EarlyQueue(Struct, frozen=True):
    """Early turns in order, at most one in each slot."""

    turns: tuple[EarlyTurn, ...] = ()
    n_rested: int = 0
    """Decode steps since the last chunk."""


class EarlyChunk(Struct, frozen=True):
    """Compute `n_tokens` of an early turn; 0: look up cached ones."""

    early_turn: EarlyTurn
    n_tokens: int


def begin(queue: EarlyQueue, early_turn: EarlyTurn) -> EarlyQueue:
    """Add a turn, in place of an older one of its slot."""
    queue = end(queue, early_turn.slot)
    return replace(queue, turns=(*queue.turns, early_turn))


def end(queue: EarlyQueue, slot: int) -> EarlyQueue:
    """Remove the turn of a slot; its KV stays there."""
    return replace(
        queue, turns=tuple(early_turn for early_turn in queue.turns if early_turn.slot != slot)
    )


def advance(queue: EarlyQueue, early_turn: EarlyTurn, position: int) -> EarlyQueue:
    """Move a turn to `position`; one token left ends it."""
    if position >= early_turn.n_prompt - 1:
        return replace(end(queue, early_turn.slot), n_rested=0)
    moved = replace(early_turn, position=position)
    turns = tuple(moved if queued == early_turn else queued for queued in queue.turns)
    return EarlyQueue(turns)


def may_run(queue: EarlyQueue, state: SchedulerState) -> bool:
    """Whether there is a turn, and no other work but decoding."""
    return bool(queue.turns) and is_quiet(state)


def next_chunk(
    queue: EarlyQueue, state: SchedulerState, speed: ThroughputModel, policy: PrefillPolicy
) -> tuple[EarlyQueue, EarlyChunk | None]:
    """Chunk of this step, or None while other work waits.

    It delays a request by one chunk within `max_stall_s` at most. Beside decoding requests there
    are long rests.
    """
    if not may_run(queue, state):
        return queue, None
    if state.n_active and queue.n_rested < REST_STEPS:
        return replace(queue, n_rested=queue.n_rested + 1), None
    early_turn = queue.turns[0]
    if early_turn.position is None:
        return queue, EarlyChunk(early_turn, 0)
    slot = Slot(early_turn.slot, position=early_turn.position, n_prompt=early_turn.n_prompt)
    # An arrival waits as shortly as a decoding request, also while none decodes.
    return queue, EarlyChunk(early_turn, chunk_size(slot, max(1, state.n_active), speed, policy))
