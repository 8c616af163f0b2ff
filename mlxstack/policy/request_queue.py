"""Request queue: priorities with aging, first come first served, one request per agent."""

from collections.abc import Iterable, Iterator

from mlxstack.policy.scheduler_state import ACTIVE, QueuedRequest, SchedulerState


def effective_priority(queued: QueuedRequest, now: float, aging_per_s: float) -> float:
    """Effective priority: base minus `aging_per_s` for each second waited; lower goes first."""
    return queued.priority - aging_per_s * max(0.0, now - queued.arrived)


def sort_queue(
    waiting: Iterable[QueuedRequest], now: float, aging_per_s: float
) -> list[QueuedRequest]:
    """The queue as it would be served now; equal urgency goes by arrival."""
    return sorted(waiting, key=lambda t: (effective_priority(t, now, aging_per_s), t.arrived))


def schedulable(state: SchedulerState, now: float, aging_per_s: float) -> Iterator[QueuedRequest]:
    """Queued requests in serving order, at most one per explicit agent and none of a busy one.

    Requests of one agent are served strictly in order of arrival, whatever their priority.
    """
    taken = {s.queued.agent for s in state.slots if s.state in ACTIVE and s.queued}
    first: dict[str, str] = {}
    for queued in sorted(state.waiting, key=lambda t: t.arrived):
        if queued.agent is not None:
            first.setdefault(queued.agent, queued.request)
    for queued in sort_queue(state.waiting, now, aging_per_s):
        is_turn = queued.agent not in taken and first.get(queued.agent or "") == queued.request
        if queued.agent is None or is_turn:
            yield queued


def expired(state: SchedulerState, now: float) -> list[QueuedRequest]:
    """Requests whose deadline has passed, queued or in a slot."""
    requests = [*state.waiting, *(s.queued for s in state.slots if s.queued)]
    return [t for t in requests if t.deadline is not None and now >= t.deadline]


def retry_after(state: SchedulerState, seconds_per_ask: float) -> float:
    """Seconds until the queue has likely moved by one: queue length over slots."""
    ahead = len(state.waiting) + 1
    return max(1.0, ahead * seconds_per_ask / max(1, len(state.slots)))
