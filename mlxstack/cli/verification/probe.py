"""Engine in its own home, asked for greedy answers."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.commands import SlotCommand
from mlxstack.core.engine_events import (
    Event,
    RequestFailed,
    RequestFinished,
    RequestTimings,
    SlotAssigned,
    TokenSampled,
)
from mlxstack.core.errors import Broken, SetupError
from mlxstack.core.interfaces import EngineStores
from mlxstack.core.preset import Preset, ServiceKind
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Request, SamplingParams
from mlxstack.host.hardware import MemoryBudget
from mlxstack.host.home import Home
from mlxstack.planner.candidate import Candidate
from mlxstack.planner.derived_preset import candidate_for
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.store.slot_files import SlotFileFolder

N_ANSWER = 24
"""Tokens of an answer by default."""
WAIT_S = 600.0
GREEDY = SamplingParams(top_logprobs=2)
Say = Callable[[str], None]


def chat_model(name: str, home: Home, budget: MemoryBudget) -> Candidate:
    """Planner input of a preset or a chat model. Raises SetupError."""
    candidate = candidate_for(name, home, budget)
    if candidate.preset.kind is not ServiceKind.CHAT:
        raise SetupError(f"`{name}` is an embedding model; only chat models have KV to verify")
    return candidate


class GreedyResponse(Struct, frozen=True):
    """The answer to one request; `times` are those of its tokens."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tops: tuple[tuple[tuple[int, float], ...], ...]
    assigned: SlotAssigned
    timings: RequestTimings
    times: tuple[float, ...]

    def last(self, n_tokens: int) -> "GreedyResponse":
        """The response without all but its last tokens."""
        tail = slice(-n_tokens, None)
        return replace(
            self,
            tokens=self.tokens[tail],
            logprobs=self.logprobs[tail],
            tops=self.tops[tail],
            times=self.times[tail],
        )


class EngineProbe:
    """Engine in its own home, with its requests' events."""

    def __init__(self, preset: Preset, home: Path) -> None:
        self.preset = preset
        self._events: dict[str, list[tuple[float, Event]]] = {}
        self._ends: dict[str, RequestFinished | RequestFailed] = {}
        self._arrived = threading.Condition()
        self._ids = (f"verify-{n}" for n in count())
        from mlxstack.engine.chat_engine import ChatEngine  # MLX, which no other command loads

        stores = EngineStores(DiskKVStore(home / "kv"), SlotFileFolder(home / "slots"))
        self.engine = ChatEngine(preset, stores, self._deliver)

    def submit(
        self,
        tokens: Sequence[int],
        n: int = N_ANSWER,
        checkpoint_positions: tuple[int, ...] = (),
        **more: Any,
    ) -> str:
        """Begin a greedy request of exactly `n` tokens."""
        prompt = PromptTokens(tuple(tokens), checkpoint_positions=checkpoint_positions)
        options = {"sampling": GREEDY, "arrived": time.monotonic(), **more}
        request = Request(next(self._ids), prompt, n, **options)
        self._events[request.id] = []
        self.engine.submit(request)
        return request.id

    def response(self, request: str) -> GreedyResponse:
        """Wait for the end of a request. Raises its error."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: request in self._ends, WAIT_S):
                raise Broken(f"the engine did not answer within {WAIT_S:.0f} s")
        last = self._ends[request]
        if isinstance(last, RequestFailed):
            raise last.error
        events = self._events[request]
        sampled = [(moment, event) for moment, event in events if isinstance(event, TokenSampled)]
        return GreedyResponse(
            tokens=tuple(token.token for _, token in sampled),
            logprobs=tuple(token.logprob or 0.0 for _, token in sampled),
            tops=tuple(token.top for _, token in sampled),
            assigned=next(event for _, event in events if isinstance(event, SlotAssigned)),
            timings=last.timings,
            times=tuple(moment for moment, _ in sampled),
        )

    def ask(self, tokens: Sequence[int], n: int = N_ANSWER, **more: Any) -> GreedyResponse:
        """Submit a request, and wait for its end."""
        return self.response(self.submit(tokens, n, **more))

    def cold(self, tokens: Sequence[int], n: int = N_ANSWER) -> GreedyResponse:
        """The answer from an empty cache, alone."""
        return self.ask(tokens, n, use_cache=False, slot=0)

    def run(self, command: SlotCommand) -> None:
        """Run a slot command, and wait for its end. Raises its error."""
        self.engine.run_slot_command(command).result(WAIT_S)

    def until_begun(self, slot: int) -> int:
        """Wait for an early turn in a slot; its tokens, else 0."""
        end = time.monotonic() + WAIT_S / 10
        while time.monotonic() < end:
            view = self.engine.snapshot().slots[slot]
            if view.n_early and not view.n_early_left:
                return view.n_early
            time.sleep(0.01)
        return 0

    def _deliver(self, events: tuple[Event, ...]) -> None:
        with self._arrived:
            for event in events:
                self._events[event.request].append((time.monotonic(), event))
                if isinstance(event, RequestFinished | RequestFailed):
                    self._ends[event.request] = event
            self._arrived.notify_all()


@contextmanager
def probe(preset: Preset, home: Path) -> Iterator[EngineProbe]:
    """Loaded engine, stopped at the end. Raises SetupError."""
    engine_probe = EngineProbe(preset, home)
    engine_probe.engine.start().result()
    try:
        yield engine_probe
    finally:
        engine_probe.engine.stop(1.0).result(WAIT_S)
