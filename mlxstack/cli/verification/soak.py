"""`verify --soak`: two streams with evictions for minutes, against cold answers.

It provokes the kernel panic of https://github.com/ml-explore/mlx/issues/3186, where KV is wired.
"""

import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from msgspec.structs import asdict, replace

from mlxstack.bench.environment import Conditions, conditions, ended
from mlxstack.cli.check_result import CheckLevel
from mlxstack.cli.verification.identity import EXACT, ROUNDED, Verifier, compare, verified
from mlxstack.cli.verification.probe import EngineProbe, Say, chat_model, probe
from mlxstack.cli.verification.soak_record import (
    InterruptedSoak,
    SoakCounts,
    interrupted_soak,
    recorded,
)
from mlxstack.core.preset import AUTO, Preset, Wired
from mlxstack.host.diagnostic_reports import DiagnosticReport
from mlxstack.host.hardware import this_memory
from mlxstack.host.home import Home
from mlxstack.planner.candidate import SINGLE_BYTES
from mlxstack.planner.fit import refuse_if_too_big
from mlxstack.planner.memory_room import room_in
from mlxstack.policy.memory.capacity import Budget, need

N_HEAD = 384
N_OWN = 192
N_ANSWER = 48
MAX_ENTRIES = 4
"""Segments of KV in memory at most."""
COLD_EVERY = 8
"""Rounds between two comparisons with a cold answer."""


class SoakReport(SoakCounts, kw_only=True):
    """Counts, their bounds, and what macOS reported."""

    preset: str
    conditions: Conditions
    wired: Wired
    seconds: float
    n_evicted: int
    kv_budget_bytes: int
    planned_bytes: int
    """Weights, workspace, margin and the KV budget, which holds the slots full."""
    memory_limit_bytes: int
    reports: tuple[DiagnosticReport, ...] | None
    """Of panics, the GPU and crashes; None but on macOS."""
    interrupted: InterruptedSoak | None
    """The soak before, if it had no end."""
    is_sound: bool


class Soaker:
    """Two streams on one engine, and what they show."""

    def __init__(
        self,
        engine_probe: EngineProbe,
        tolerance: float,
        say: Say,
        keep: Callable[[SoakCounts], None],
    ) -> None:
        self._keep = keep
        self._probe = engine_probe
        self._tolerance = tolerance
        self._say = say
        self._text = Verifier(engine_probe, tolerance, say)
        self.counts = SoakCounts()

    def run(self, seconds: float) -> None:
        """Run rounds until the end; at least one compares with cold."""
        end = time.monotonic() + seconds
        n_rounds = 0
        while time.monotonic() < end or not n_rounds:
            self._round(is_compared=n_rounds % COLD_EVERY == 0)
            n_rounds += 1
            self._keep(self.counts)

    def _round(self, *, is_compared: bool) -> None:
        """Two new conversations at once, and the next turn of each."""
        counts = self.counts
        prompts = [self._text.head + self._text.random_tokens(N_OWN) for _ in range(2)]
        for _ in range(2):
            ids = [self._probe.submit(tokens, N_ANSWER) for tokens in prompts]
            answers = [self._probe.response(request_id) for request_id in ids]
            for tokens, answer in zip(prompts, answers, strict=True):
                pauses = [b - a for a, b in pairwise(answer.times)]
                counts.longest_pause_s = max([counts.longest_pause_s, *pauses])
                if is_compared:
                    cold = self._probe.cold(tokens, len(answer.tokens))
                    level, detail = compare(cold, answer, self._tolerance)
                    counts.n_compared += 1
                    counts.n_different += level is CheckLevel.BAD
                    self._say(f"{level.value:4} answer {counts.n_answers + 1}: {detail}")
                counts.n_answers += 1
            prompts = [
                tokens + answer.tokens + self._text.random_tokens(24)
                for tokens, answer in zip(prompts, answers, strict=True)
            ]
        now = self._probe.engine.snapshot()
        counts.active_bytes = max(counts.active_bytes, now.active_bytes)
        counts.kv_bytes = max(counts.kv_bytes, now.kv_bytes)


def _soaked(preset: Preset) -> Preset:
    """Preset with few slots and entries, so that prompts are evicted."""
    preset = verified(preset)
    cache = replace(preset.prefix_cache, max_entries=MAX_ENTRIES)
    return replace(preset, slots=replace(preset.slots, count=2), prefix_cache=cache)


def soak(name: str, home: Home, env: Mapping[str, str], say: Say, seconds: float) -> SoakReport:
    """Soak a preset or a model in a temporary home. Raises SetupError."""
    memory = this_memory(env)
    candidate = chat_model(name, home, memory)
    preset = _soaked(candidate.preset)
    parts = need(replace(candidate, preset=preset).load(memory))
    if preset.prefix_cache.memory_budget_pct == AUTO:
        # The budget of `auto` is all memory, which no excess would exceed.
        pct = Budget(memory.total, 1).holding(parts.kv).pct
        preset = replace(preset, prefix_cache=replace(preset.prefix_cache, memory_budget_pct=pct))
    refuse_if_too_big(replace(candidate, preset=preset), room_in(home, memory))
    tolerance = ROUNDED
    if memory.half_bytes == SINGLE_BYTES:
        tolerance = EXACT
    about = conditions(preset.model.id, datetime.now(UTC).date(), env)
    interrupted = interrupted_soak(home)
    if interrupted is not None:
        say(f"warn: {interrupted}")
    began = time.monotonic()
    with (
        recorded(home, preset, seconds) as recorder,
        tempfile.TemporaryDirectory(prefix="mlx-stack-soak-") as folder,
        probe(preset, Path(folder)) as engine_probe,
    ):
        run = Soaker(engine_probe, tolerance, say, recorder.keep)
        run.run(seconds)
        counts = run.counts
        last = engine_probe.engine.snapshot()
    reports = recorder.reports()
    planned = parts.total - parts.kv + last.kv_budget_bytes
    return SoakReport(
        **asdict(counts),
        preset=preset.name,
        conditions=ended(about),
        wired=preset.device.wired,
        seconds=time.monotonic() - began,
        n_evicted=last.counters.n_evicted,
        kv_budget_bytes=last.kv_budget_bytes,
        planned_bytes=planned,
        memory_limit_bytes=memory.usable,
        reports=reports,
        interrupted=interrupted,
        is_sound=not counts.n_different
        and not reports
        and counts.active_bytes <= planned
        and counts.kv_bytes <= last.kv_budget_bytes,
    )
