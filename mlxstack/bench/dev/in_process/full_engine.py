"""Decode speed of the whole engine, with thread, scheduler and events."""

import queue
import tempfile
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from random import Random

from mlxstack.bench.dev.trials import BenchResult, FullEngine, TrialSamples
from mlxstack.core.engine_events import Event, RequestFailed, RequestFinished, TokenSampled
from mlxstack.core.interfaces import EngineStores
from mlxstack.core.preset import ModelSpec, Preset, SlotSpec
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Request
from mlxstack.engine.chat_engine import ChatEngine
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.store.slot_files import SlotFileFolder

N_VOCAB = 1000
Arrived = tuple[float, Event]


def whole(trial: FullEngine, model: str) -> BenchResult:
    """Seconds per step while all rows decode, once per pass."""
    room = trial.n_prompt + trial.n_tokens + 64
    preset = Preset(
        model=ModelSpec(id=model), slots=SlotSpec(count=trial.n_rows, n_ctx=max(64, room))
    )
    with tempfile.TemporaryDirectory() as folder:
        arrived: queue.SimpleQueue[Arrived] = queue.SimpleQueue()

        def deliver(events: tuple[Event, ...]) -> None:
            for event in events:
                arrived.put((time.perf_counter(), event))

        root = Path(folder)
        stores = EngineStores(DiskKVStore(root / "kv"), SlotFileFolder(root / "slots"))
        engine = ChatEngine(preset, stores, deliver)
        engine.start().result()
        try:
            times = [_step_s(engine, arrived, trial, seed) for seed in range(trial.passes)]
        finally:
            engine.stop(drain_s=1).result()
    return BenchResult((TrialSamples("engine", "step_s", tuple(times)),))


def _step_s(
    engine: ChatEngine, arrived: "queue.SimpleQueue[Arrived]", trial: FullEngine, seed: int
) -> float:
    random = Random(seed)
    for i in range(trial.n_rows):
        prompt = PromptTokens(tuple(random.randrange(N_VOCAB) for _ in range(trial.n_prompt)))
        now = time.monotonic()
        engine.submit(Request(f"{seed}-{i}", prompt, trial.n_tokens, use_cache=False, arrived=now))
    first: dict[str, float] = {}
    tokens: list[float] = []
    ends: list[float] = []
    while len(ends) < trial.n_rows:
        moment, event = arrived.get()
        if isinstance(event, RequestFailed):
            raise event.error
        if isinstance(event, TokenSampled):
            first.setdefault(event.request, moment)
            tokens.append(moment)
        elif isinstance(event, RequestFinished):
            ends.append(moment)
    return seconds_per_step(first.values(), tokens, ends)


def seconds_per_step(
    first: Collection[float], tokens: Iterable[float], ends: Iterable[float]
) -> float:
    """Seconds per step while all rows decode, from the times of tokens."""
    start = max(first)
    stop = min(ends)
    n_steps = sum(start < moment <= stop for moment in tokens) / len(first)
    return (stop - start) / max(1.0, n_steps)
