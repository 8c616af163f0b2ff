"""Simulates agents against the real scheduler, with a throughput model as machine."""

import heapq
import math
from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct

from mlxstack.bench.dev.simulation.report import SimulatedRequest, SimulationReport, report_of
from mlxstack.bench.dev.simulation.workload import PlannedRequest, SimulatedAgent
from mlxstack.core.preset import PositiveInt
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Caller, Request
from mlxstack.policy.scheduling import scheduler, scheduler_state
from mlxstack.policy.scheduling.chunked_prefill import (
    ThroughputModel,
    observe_decode,
    observe_prefill,
    stall_left,
    steps_within,
)
from mlxstack.policy.scheduling.scheduler import (
    AssignSlot,
    Lookup,
    PrefillChunk,
    SchedulerLimits,
    is_full,
    next_prefill_chunk,
    schedule,
)
from mlxstack.policy.scheduling.scheduler_state import SlotState


class SimulatedMachine(Struct, frozen=True):
    """A machine and its slots.

    Prefill runs at `prefill_tps` tokens per second at position 0; each token before a token makes
    it slower by the share `slowdown`. A pass over prompts takes `pass_s` beside, to read the
    weights. A decode step takes `step_s` plus `row_s` per row, a block of the vision tower
    `block_s`.
    """

    n_slots: PositiveInt = 8
    prefill_tps: Annotated[float, Meta(gt=0)] = 1500.0
    slowdown: Annotated[float, Meta(ge=0)] = 0.0
    pass_s: Annotated[float, Meta(ge=0)] = 0.0
    step_s: Annotated[float, Meta(gt=0)] = 0.020
    row_s: Annotated[float, Meta(ge=0)] = 0.002
    block_s: Annotated[float, Meta(gt=0)] = 0.1

    def chunk_s(self, start: int, n_tokens: int) -> float:
        """Seconds of a pass over `n_tokens` from position `start` on."""
        return self.shared_s([range(start, start + n_tokens)])

    def shared_s(self, chunks: Iterable[range]) -> float:
        """Seconds of a pass over these positions of several prompts."""
        middles = [(len(chunk), chunk.start + len(chunk) / 2) for chunk in chunks]
        work = sum(n_tokens * (1.0 + self.slowdown * middle) for n_tokens, middle in middles)
        return self.pass_s + work / self.prefill_tps

    def decode_s(self, n_rows: int) -> float:
        """Seconds of one step for `n_rows` rows."""
        return self.step_s + self.row_s * n_rows


def simulate(
    agents: Iterable[SimulatedAgent], machine: SimulatedMachine, limits: SchedulerLimits
) -> SimulationReport:
    """Run all requests of all agents, and report their waiting times.

    Takes the steps of the engine: assign slots, choose a chunk, decode, prefill. Refused requests
    are retried after the time that the refusal names.
    """
    play = Simulation(agents, machine, limits)
    while play.has_work:
        play.turn()
    return play.report()


class RequestUnderWay:
    """A request under way. Times are simulated seconds."""

    def __init__(self, agent: SimulatedAgent, index: int, now: float) -> None:
        self.agent = agent
        self.index = index
        self.id = f"{agent.name}/{index}"
        self.arrived = now
        self.seated = 0.0
        self.first_token: float | None = None
        self.last_token = 0.0
        self.n_left = self.plan.n_answer
        self.n_blocks = self.plan.n_blocks
        self.block_s = 0.0

    @property
    def plan(self) -> PlannedRequest:
        return self.agent.requests[self.index]

    def request(self, arrived: float) -> Request:
        """Request for the scheduler, which only counts its tokens."""
        return Request(
            id=self.id,
            prompt=PromptTokens((0,) * self.plan.n_prompt),
            max_tokens=self.plan.n_answer,
            slot=self.agent.pin,
            caller=Caller(
                agent=self.agent.name, priority=self.agent.priority, turn_kind=self.agent.turn_kind
            ),
            arrived=arrived,
        )


class Simulation:
    """Course of a simulation, in turns of the engine."""

    def __init__(
        self, agents: Iterable[SimulatedAgent], machine: SimulatedMachine, limits: SchedulerLimits
    ) -> None:
        self._machine = machine
        self._limits = limits
        self._lookup = Lookup(self._match)
        self._now = 0.0
        self._state = scheduler_state.initial_state(machine.n_slots)
        self._speed = ThroughputModel()
        self._coming: list[tuple[float, str, RequestUnderWay]] = []
        self._live: dict[str, RequestUnderWay] = {}
        self._rows: dict[int, RequestUnderWay] = {}
        self._context: dict[int, str] = {}
        self._samples: list[SimulatedRequest] = []
        self._is_settled = False
        self._silence = self._busy = 0.0
        self._ask_s = 1.0
        self._n_refused = self._n_warm = self._n_computed = 0
        for agent in agents:
            self._plan(agent, 0)

    @property
    def has_work(self) -> bool:
        return bool(self._coming or self._live)

    def turn(self) -> None:
        """One turn of the engine, or the way to the next arrival."""
        if not self._live:
            self._now = max(self._now, self._next_event())
        self._take_arrivals()
        if not self._is_settled:
            self._slot()
        began = self._now
        self._state, chunk = next_prefill_chunk(self._state, self._speed, self._limits.prefill)
        if self._rows and not (chunk and chunk.is_awaited):
            self._decode(1 if chunk else self._n_uneventful())
        if chunk:
            self._prefill(chunk)
        self._busy += self._now - began

    def report(self) -> SimulationReport:
        return report_of(
            self._samples,
            span_s=self._now,
            busy_s=self._busy,
            longest_silence_s=self._silence,
            n_refused=self._n_refused,
            n_warm=self._n_warm,
            n_computed=self._n_computed,
        )

    def _next_event(self) -> float:
        """Time of what comes by itself, infinite if nothing does."""
        if self._coming:
            return self._coming[0][0]
        return math.inf

    def _plan(self, agent: SimulatedAgent, index: int) -> None:
        if index < len(agent.requests):
            live = RequestUnderWay(agent, index, self._now + agent.requests[index].after_s)
            heapq.heappush(self._coming, (live.arrived, live.id, live))

    def _take_arrivals(self) -> None:
        while self._coming and self._coming[0][0] <= self._now:
            arrived, _, live = heapq.heappop(self._coming)
            request = live.request(arrived)
            if is_full(self._state, request, self._now, self._limits, self._lookup):
                again = self._now + scheduler.retry_after(self._state, self._ask_s)
                heapq.heappush(self._coming, (again, live.id, live))
                self._n_refused += 1
                continue
            self._live[live.id] = live
            self._state = scheduler_state.enqueue(self._state, request)
            self._is_settled = False

    def _slot(self) -> None:
        """Skip scheduling without an arrival or an end: nothing would change."""
        self._is_settled = True
        self._state, actions = schedule(self._state, self._now, self._limits, self._lookup)
        for action in actions:
            assert isinstance(action, AssignSlot)
            self._sit(self._live[action.request.id], action.slot)

    def _match(self, request: str, slot: int) -> int:
        live = self._live[request]
        is_own = self._context.get(slot) == live.agent.name
        if is_own:
            return min(self._state.slot(slot).n_tokens, live.plan.n_prompt - 1)
        return 0

    def _sit(self, live: RequestUnderWay, slot: int) -> None:
        live.seated = self._now
        shared = self._match(live.id, slot)
        self._n_warm += shared > 0
        n_cached = min(max(shared, live.plan.n_cached), live.plan.n_prompt - 1)
        self._n_computed += live.plan.n_prompt - n_cached
        self._context[slot] = live.agent.name
        self._reach(live, slot, n_cached)

    def _reach(self, live: RequestUnderWay, slot: int, position: int) -> None:
        self._state = scheduler_state.advance(self._state, slot, position)
        if self._state.slot(slot).state is SlotState.RUNNING:
            self._rows[slot] = live

    def _n_uneventful(self) -> int:
        """Steps until a row ends or something comes."""
        n_left = min(row.n_left for row in self._rows.values())
        step = self._machine.decode_s(len(self._rows))
        n_steps = min(n_left, (self._next_event() - self._now) / step)
        return max(1, math.ceil(n_steps))

    def _decode(self, n_steps: int) -> None:
        step = self._machine.decode_s(len(self._rows))
        first = self._now + step
        self._now += n_steps * step
        self._speed = observe_decode(self._speed, step)
        for slot, live in list(self._rows.items()):
            if live.first_token is None:
                live.first_token = first
                self._state = scheduler_state.begin_answer(self._state, slot)
            else:
                self._silence = max(self._silence, first - live.last_token)
            live.last_token = self._now
            live.n_left -= n_steps
            if live.n_left <= 0:
                self._end(live, slot)

    def _prefill(self, chunk: PrefillChunk) -> None:
        slot = self._state.slot(chunk.slot)
        assert slot.request is not None
        if (live := self._live[slot.request.id]).n_blocks:
            self._encode(live)
            return
        parts = (chunk, *chunk.beside)
        starts = [self._state.slot(part.slot).position for part in parts]
        seconds = self._machine.shared_s(
            range(start, start + part.n_tokens) for start, part in zip(starts, parts, strict=True)
        )
        self._now += seconds
        n_tokens = sum(part.n_tokens for part in parts)
        for part in parts:
            self._end_chunk(part, seconds * part.n_tokens / n_tokens)

    def _end_chunk(self, chunk: PrefillChunk, seconds: float) -> None:
        slot = self._state.slot(chunk.slot)
        assert slot.request is not None
        self._speed = observe_prefill(self._speed, slot.position, chunk.n_tokens, seconds)
        live = self._live[slot.request.id]
        self._reach(live, chunk.slot, slot.position + chunk.n_tokens)

    def _encode(self, live: RequestUnderWay) -> None:
        """Blocks of the tower in place of a chunk."""
        policy = self._limits.prefill
        free_s = stall_left(self._speed, policy) if self._rows else policy.patience_s
        n_blocks = min(live.n_blocks, steps_within(free_s, live.block_s))
        live.block_s = self._machine.block_s
        live.n_blocks -= n_blocks
        self._now += n_blocks * self._machine.block_s

    def _end(self, live: RequestUnderWay, slot: int) -> None:
        plan = live.plan
        del self._rows[slot], self._live[live.id]
        self._state = scheduler_state.release_slot(
            self._state, slot, plan.n_prompt + plan.n_answer, self._now
        )
        self._is_settled = False
        self._ask_s = 0.8 * self._ask_s + 0.2 * (self._now - live.seated)
        self._samples.append(
            SimulatedRequest(
                priority=live.agent.priority,
                waited_s=live.seated - live.arrived,
                ttft_s=(live.first_token or self._now) - live.arrived,
                n_prompt=plan.n_prompt,
                n_generated=plan.n_answer,
            )
        )
        self._plan(live.agent, live.index + 1)
