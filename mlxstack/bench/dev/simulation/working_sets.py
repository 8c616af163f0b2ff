"""Simulation of admission by working set.

Agents whose contexts would evict each other wait between two tools.
`python -m mlxstack.bench.dev.simulation.working_sets [FOLDER]` compares the minutes of sessions
with and without it, for the recorded sessions of `bench fleet` or the traces of a folder.
"""

import heapq
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from mlxstack.bench.dev.simulation.simulate import RequestUnderWay, SimulatedMachine, Simulation
from mlxstack.bench.dev.simulation.workload import PlannedRequest, SimulatedAgent
from mlxstack.bench.fleet import session as fleet
from mlxstack.bench.report import ReportTable, table_markdown
from mlxstack.policy.scheduling import scheduler_state
from mlxstack.policy.scheduling.scheduler import Lookup, SchedulerLimits

PERSON_S = 30.0
"""Pause before another question of a person in recorded sessions."""
RUN_PAUSE_S = 20.0
"""Pause that ends a run of tools: the agent gives its place away."""
N_AGENTS = 8
SHARES = (0.5, 0.75, 1.0)
N_OWN = 200
"""Tokens of a first prompt after the head that agents of one client share."""
HEADS = (
    *("Machine", "Disk", "KV memory", "Mean session", "admitted", "Ratio"),
    *("Last session", "admitted", "Ratio", "Restored", "admitted"),
)


class KVTiers(Struct, frozen=True):
    """KV memory and disk.

    `memory_tokens` fit into memory; `restore_tps` are read per second, 0: none are on disk.
    """

    memory_tokens: int
    restore_tps: float


class MachineCase(Struct, frozen=True):
    """Machine with a name, its slots aside."""

    name: str
    machine: SimulatedMachine
    restore_tps: float


def _mac(prefill_tps: float, bandwidth: float, disk: float, name: str) -> MachineCase:
    """Mac with a dense model of 8B.

    It has 4.6 GB of weights in 4 bits and 147 kB of KV per token. `bandwidth` and `disk` are in
    GB/s; a row reads 15,000 tokens of KV. Assumed, not measured.
    """
    machine = SimulatedMachine(
        n_slots=N_AGENTS,
        prefill_tps=prefill_tps,
        slowdown=4e-5,
        pass_s=4.6 / bandwidth / 0.8,
        step_s=4.6 / bandwidth / 0.8,
        row_s=2.2 / bandwidth / 0.8,
    )
    return MachineCase(name, machine, disk * 1e9 / 147e3)


MACHINES = (
    _mac(110, 68, 2.9, "M1"),
    _mac(150, 100, 3.0, "M2"),
    _mac(175, 100, 3.0, "M3"),
    _mac(200, 120, 3.1, "M4"),
    _mac(200, 120, 0.5, "M4, slow disk"),
    _mac(200, 120, 0.0, "M4, no disk tier"),
    _mac(700, 153, 6.0, "M5"),
    MachineCase(
        "two cores, 0.5B", SimulatedMachine(N_AGENTS, 40.0, 4e-5, 0.1, 0.12, 0.02), 40_000.0
    ),
)


class SimulatedRun(Struct, frozen=True):
    """Seconds of each session, and tokens by origin."""

    session_s: tuple[float, ...]
    n_restored: int
    n_computed: int


class KVMemory:
    """Resident tokens of each agent's context, at most `max_tokens` in all."""

    def __init__(self, max_tokens: int) -> None:
        self._max = max_tokens
        self._resident: dict[str, int] = {}
        """The first one was not used for longest."""

    def n_resident(self, agent: str) -> int:
        """Tokens of an agent's context in memory."""
        return self._resident.get(agent, 0)

    def hold(self, agent: str, n_tokens: int, active: Collection[str]) -> None:
        """Take a context in; ends of others leave.

        Contexts of `active` agents stay.
        """
        self._resident.pop(agent, None)
        self._resident[agent] = n_tokens
        n_excess = sum(self._resident.values()) - self._max
        for other, n_others in list(self._resident.items()):
            if n_excess > 0 and other != agent and other not in active:
                n_dropped = min(n_excess, n_others)
                self._resident[other] -= n_dropped
                n_excess -= n_dropped


def admitted(runs: Mapping[str, int], max_tokens: int) -> frozenset[str]:
    """Agents whose working sets fit together.

    `runs` has the tokens of each agent at work, in the order in which they began. The first one is
    admitted in any case, and none after one that does not fit.
    """
    chosen: list[str] = []
    n_tokens = 0
    for agent, n_own in runs.items():
        n_tokens += n_own
        if chosen and n_tokens > max_tokens:
            break
        chosen.append(agent)
    return frozenset(chosen)


class WorkingSetSimulation(Simulation):
    """Simulation with bounded KV memory and a disk."""

    def __init__(
        self,
        agents: Sequence[SimulatedAgent],
        machine: SimulatedMachine,
        tiers: KVTiers,
        *,
        is_admitting: bool,
    ) -> None:
        super().__init__(agents, machine, SchedulerLimits(max_bytes=tiers.memory_tokens))
        self._lookup = Lookup(self._match, kv_bytes=lambda r: len(r.tokens) + r.max_tokens)
        self._tiers = tiers
        self._is_admitting = is_admitting
        self._contexts = KVMemory(tiers.memory_tokens)
        self._runs: dict[str, int] = {}
        self._held: list[RequestUnderWay] = []
        self._loads: list[tuple[float, int, int]] = []
        """Reads from disk: their end, their slot, its position then."""
        self._disk_free = 0.0
        self._n_restored = 0
        self._ends: dict[str, float] = {}

    def run(self) -> SimulatedRun:
        """Run all sessions to their ends."""
        while self.has_work:
            self.turn()
        return SimulatedRun(tuple(self._ends.values()), self._n_restored, self._n_computed)

    def turn(self) -> None:
        """One turn of the engine, or a wait."""
        began = self._now
        while self._loads and self._loads[0][0] <= self._now:
            _, slot, position = heapq.heappop(self._loads)
            request = self._state.slot(slot).request
            assert request is not None
            self._state = scheduler_state.finish_loading(self._state, slot)
            self._reach(self._live[request.id], slot, position)
        super().turn()
        if self._now == began and self.has_work:
            self._now = max(self._now, self._next_event())

    def _next_event(self) -> float:
        event = super()._next_event()
        if self._loads:
            event = min(event, self._loads[0][0])
        return event

    def _take_arrivals(self) -> None:
        """Hold back what is not admitted."""
        while self._coming and self._coming[0][0] <= self._now:
            live = heapq.heappop(self._coming)[2]
            self._held.append(live)
            self._runs[live.agent.name] = _working_set(live)
        self._release()
        super()._take_arrivals()

    def _release(self) -> None:
        allowed = admitted(self._runs, self._tiers.memory_tokens)
        for live in list(self._held):
            if not self._is_admitting or live.agent.name in allowed:
                self._held.remove(live)
                heapq.heappush(self._coming, (live.arrived, live.id, live))

    def _sit(self, live: RequestUnderWay, slot: int) -> None:
        live.seated = self._now
        name = live.agent.name
        n_known = min(live.plan.n_cached, live.plan.n_prompt - 1)
        n_cached = min(self._contexts.n_resident(name), n_known)
        active = {s.request.agent for s in self._state.slots if s.request and s.request.agent}
        self._contexts.hold(name, live.plan.n_prompt + live.plan.n_answer, active)
        self._context[slot] = name
        n_missing = n_known - n_cached
        if n_missing and self._tiers.restore_tps:
            self._disk_free = max(self._now, self._disk_free) + n_missing / self._tiers.restore_tps
            self._state = scheduler_state.start_loading(self._state, slot)
            heapq.heappush(self._loads, (self._disk_free, slot, n_known))
            self._n_restored += n_missing
            n_cached = n_known
        else:
            self._reach(live, slot, n_cached)
        self._n_computed += live.plan.n_prompt - n_cached

    def _end(self, live: RequestUnderWay, slot: int) -> None:
        super()._end(live, slot)
        following = live.agent.requests[live.index + 1 : live.index + 2]
        if not following:
            self._ends[live.agent.name] = self._now
        if not following or following[0].after_s >= RUN_PAUSE_S:
            self._runs.pop(live.agent.name)
            self._release()


def _working_set(live: RequestUnderWay) -> int:
    """Tokens of the largest context of this run."""
    sizes: list[int] = []
    for request in live.agent.requests[live.index :]:
        if sizes and request.after_s >= RUN_PAUSE_S:
            break
        sizes.append(request.n_prompt + request.n_answer)
    return max(sizes)


def recorded_agents(n_agents: int) -> tuple[SimulatedAgent, ...]:
    """Agents of the recorded sessions, by turns."""
    plans = [tuple(_planned(session)) for session in fleet.sessions()]
    agents = []
    for i in range(n_agents):
        first, *following = plans[i % len(plans)]
        if i >= len(plans):
            first = msgspec.structs.replace(first, n_cached=max(0, first.n_prompt - N_OWN))
        agents.append(SimulatedAgent(f"agent-{i}", (first, *following)))
    return tuple(agents)


def _planned(session: fleet.RecordedSession) -> Iterator[PlannedRequest]:
    n_known = 0
    prompts = fleet.requests(session, "simulated", 0)
    for recorded, prompt in zip(session.requests, prompts, strict=True):
        pause_s = recorded.pause_s
        if n_known and any(message["role"] == "user" for message in recorded.messages):
            pause_s = PERSON_S
        n_prompt = prompt.n_tokens - prompt.n_answer
        yield PlannedRequest(pause_s, n_prompt, prompt.n_answer, n_known)
        n_known = prompt.n_tokens


class TraceStep(Struct, frozen=True):
    """Step of a session in ThunderAgent's profiles."""

    first_chunk_timestamp: float
    prefill_time: float
    decode_time: float
    input_tokens: int
    output_tokens: int


def traced_agents(folder: Path, n_agents: int) -> tuple[SimulatedAgent, ...]:
    """Agents of the first traces (`*.jsonl`) by name."""
    files = sorted(folder.glob("*.jsonl"))[:n_agents]
    return tuple(SimulatedAgent(file.stem, tuple(_traced(file))) for file in files)


def _traced(file: Path) -> Iterator[PlannedRequest]:
    ended: float | None = None
    n_known = 0
    for step in msgspec.json.Decoder(TraceStep).decode_lines(file.read_bytes()):
        began = step.first_chunk_timestamp - step.prefill_time
        pause_s = max(0.0, began - (began if ended is None else ended))
        yield PlannedRequest(pause_s, step.input_tokens, max(1, step.output_tokens), n_known)
        n_known = step.input_tokens + step.output_tokens
        ended = step.first_chunk_timestamp + step.decode_time


def compared(agents: Sequence[SimulatedAgent], case: MachineCase, share: float) -> tuple[str, ...]:
    """Row of a machine, without admission and with it.

    Memory holds a `share` of all working sets.
    """
    n_all = sum(max(r.n_prompt + r.n_answer for r in agent.requests) for agent in agents)
    tiers = KVTiers(round(share * n_all), case.restore_tps)
    runs = [
        WorkingSetSimulation(agents, case.machine, tiers, is_admitting=is_admitting).run()
        for is_admitting in (False, True)
    ]
    cells = [case.name, f"{case.restore_tps:,.0f} tokens/s", f"{share:g} x"]
    for times in ([sum(r.session_s) / len(agents) for r in runs], [max(r.session_s) for r in runs]):
        before, after = times
        cells += [f"{before / 60:.1f} min", f"{after / 60:.1f} min", f"{after / before:.2f} x"]
    cells += [f"{run.n_restored / 1000:.0f}k" for run in runs]
    return tuple(cells)


def main(*folders: str) -> None:
    """Print the table of recorded or traced sessions."""
    agents = recorded_agents(N_AGENTS)
    if folders:
        agents = traced_agents(Path(folders[0]), N_AGENTS)
    rows = tuple(compared(agents, case, share) for case in MACHINES for share in SHARES)
    sys.stdout.write(table_markdown(ReportTable("Admission by working set", HEADS, rows)) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
