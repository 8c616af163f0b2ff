"""Synthetic workload: agents and their requests, drawn from samples of the caller."""

import math
from collections.abc import Iterator
from typing import Annotated

from msgspec import Meta, Struct

from mlxstack.core.preset import NonNegativeInt, PositiveInt
from mlxstack.core.request import Priority, TurnKind

Share = Annotated[float, Meta(ge=0, le=1)]


class PlannedRequest(Struct, frozen=True):
    """A request `after_s` seconds after the agent's last answer ended.

    `n_cached` prompt tokens are found outside the agent's own slot (a shared head, parked, disk).
    An image at the first token to compute goes through `n_blocks` blocks of the tower.
    """

    after_s: float
    n_prompt: int
    n_answer: int
    n_cached: int = 0
    n_blocks: NonNegativeInt = 0


class SimulatedAgent(Struct, frozen=True):
    """Agent with its requests in order; `pin` is its only slot."""

    name: str
    requests: tuple[PlannedRequest, ...]
    priority: Priority = Priority.NORMAL
    turn_kind: TurnKind = TurnKind.PERSON
    pin: int | None = None


class Workload(Struct, frozen=True):
    """Parameters of agents. Pairs are (least, most), evenly spread; counts are tokens.

    First requests arrive evenly over `span_s`; `pause_s` is the mean of an exponential. All prompts
    share `n_head` tokens, then each request adds `n_new`. `cached_share` of an agent's own history
    is found again after it lost its slot. `low` and `high` are the shares of these priorities.
    """

    n_agents: PositiveInt = 1000
    span_s: Annotated[float, Meta(ge=0)] = 3600.0
    n_asks: tuple[PositiveInt, PositiveInt] = (1, 5)
    pause_s: Annotated[float, Meta(ge=0)] = 30.0
    n_head: NonNegativeInt = 2000
    n_new: tuple[PositiveInt, PositiveInt] = (50, 1200)
    n_answer: tuple[PositiveInt, PositiveInt] = (20, 240)
    cached_share: Share = 0.9
    high: Share = 0.1
    low: Share = 0.3


def draw_agents(workload: Workload, samples: Iterator[float]) -> tuple[SimulatedAgent, ...]:
    """Agents as `workload` describes; `samples` are uniform in [0, 1)."""
    return tuple(_agent(f"agent-{n}", workload, samples) for n in range(workload.n_agents))


def _agent(name: str, workload: Workload, samples: Iterator[float]) -> SimulatedAgent:
    requests: list[PlannedRequest] = []
    after = next(samples) * workload.span_s
    n_history = 0
    for _ in range(_between(workload.n_asks, samples)):
        n_cached = workload.n_head + int(workload.cached_share * n_history)
        n_history += _between(workload.n_new, samples)
        n_answer = _between(workload.n_answer, samples)
        requests.append(PlannedRequest(after, workload.n_head + n_history, n_answer, n_cached))
        n_history += n_answer
        after = -math.log(1.0 - next(samples)) * workload.pause_s
    return SimulatedAgent(name, tuple(requests), _priority(workload, next(samples)))


def _priority(workload: Workload, sample: float) -> Priority:
    if sample < workload.high:
        return Priority.HIGH
    if sample < workload.high + workload.low:
        return Priority.LOW
    return Priority.NORMAL


def _between(bounds: tuple[int, int], samples: Iterator[float]) -> int:
    least, most = bounds
    return least + int(next(samples) * (most - least + 1))
