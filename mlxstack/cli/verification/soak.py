"""`verify --soak`: two streams with evictions for minutes, against cold answers.

It provokes the kernel panic of https://github.com/ml-explore/mlx/issues/3186, where KV is wired.
"""

import platform
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict, replace

from mlxstack.bench.environment import Conditions, conditions
from mlxstack.cli.doctor import CheckLevel
from mlxstack.cli.verification.identity import EXACT, ROUNDED, Verifier, compare, verified
from mlxstack.cli.verification.probe import EngineProbe, Say, probe
from mlxstack.core.errors import SetupError
from mlxstack.core.preset import AUTO, ServiceKind, Wired
from mlxstack.host.hardware import this_memory
from mlxstack.host.home import Home
from mlxstack.planner.derived_preset import candidate_for
from mlxstack.planner.fit import SINGLE, refuse_if_too_big, room_in
from mlxstack.policy.memory.capacity import Budget, need

REPORTS = Path("/Library/Logs/DiagnosticReports")
"""Reports of kernel panics and of GPU restarts on macOS."""
N_HEAD, N_OWN, N_ANSWER = 384, 192, 48
MOST_ENTRIES = 4
"""Segments of KV in memory at most."""
COLD_EVERY = 8
"""Rounds between two comparisons with a cold answer."""


class SoakCounts(Struct, kw_only=True):
    """Sums over all rounds; bytes are those of the largest moment."""

    n_answers: int = 0
    n_compared: int = 0
    n_different: int = 0
    longest_pause_s: float = 0.0
    active_bytes: int = 0
    kv_bytes: int = 0


class SoakReport(SoakCounts, kw_only=True):
    """Counts, and what bounds them; `panics` is None but on macOS.

    `planned_bytes` are weights, workspace, margin and the KV budget, which holds the slots full.
    """

    preset: str
    conditions: Conditions
    wired: Wired
    seconds: float
    n_evicted: int
    kv_budget_bytes: int
    planned_bytes: int
    memory_limit_bytes: int
    panics: tuple[str, ...] | None
    is_sound: bool


def panic_files() -> set[str] | None:
    """Names of panic and GPU reports; None but on macOS."""
    if platform.system() != "Darwin":
        return None
    names = {file.name for file in REPORTS.glob("*")} if REPORTS.is_dir() else set()
    return {name for name in names if "panic" in name.lower() or "iogpu" in name.lower()}


class Soaker:
    """Two streams on one engine, and what they show."""

    def __init__(self, found: EngineProbe, tolerance: float, say: Say) -> None:
        self._probe = found
        self._tolerance = tolerance
        self._say = say
        self._text = Verifier(found, tolerance, say)
        self.counts = SoakCounts()

    def run(self, seconds: float) -> None:
        """Rounds until the time is over; at least one compares with cold."""
        end, n_rounds = time.monotonic() + seconds, 0
        while time.monotonic() < end or not n_rounds:
            self._round(is_compared=n_rounds % COLD_EVERY == 0)
            n_rounds += 1

    def _round(self, *, is_compared: bool) -> None:
        """Two new conversations at once, and the next turn of each."""
        counts = self.counts
        prompts = [self._text.head + self._text.random_tokens(N_OWN) for _ in range(2)]
        for _ in range(2):
            ids = [self._probe.submit(tokens, N_ANSWER) for tokens in prompts]
            answers = [self._probe.response(one) for one in ids]
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


def soak(wanted: str, home: Home, env: Mapping[str, str], say: Say, seconds: float) -> SoakReport:
    """Soak a preset or a model in a temporary home. Raises SetupError."""
    memory = this_memory(env)
    candidate = candidate_for(wanted, home, memory)
    if candidate.preset.kind is not ServiceKind.CHAT:
        raise SetupError(f"`{wanted}` is an embedding model; only chat models have KV to verify")
    preset = verified(candidate.preset)
    # Few slots and entries, so that cached prompts are evicted all the time.
    slots, cache = replace(preset.slots, count=2), preset.prefix_cache
    preset = replace(preset, slots=slots, prefix_cache=replace(cache, max_entries=MOST_ENTRIES))
    parts = need(replace(candidate, preset=preset).load(memory.half_bytes, memory.total))
    if cache.memory_budget_pct == AUTO:
        # The budget of `auto` is all memory, which no excess would exceed.
        pct = Budget(memory.total, 1).holding(parts.kv).pct
        preset = replace(preset, prefix_cache=replace(preset.prefix_cache, memory_budget_pct=pct))
    refuse_if_too_big(replace(candidate, preset=preset), room_in(home, memory))
    tolerance = EXACT if memory.half_bytes == SINGLE else ROUNDED
    before, began = panic_files(), time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="mlx-stack-soak-") as folder,
        probe(preset, Path(folder)) as found,
    ):
        run = Soaker(found, tolerance, say)
        run.run(seconds)
        counts = run.counts
        last = found.engine.snapshot()
    after = panic_files()
    planned = parts.total - parts.kv + last.kv_budget_bytes
    panics = None if before is None or after is None else tuple(sorted(after - before))
    return SoakReport(
        **asdict(counts),
        preset=preset.name,
        conditions=conditions(preset.model.id, datetime.now(UTC).date(), env),
        wired=preset.device.wired,
        seconds=time.monotonic() - began,
        n_evicted=last.counters.n_evicted,
        kv_budget_bytes=last.kv_budget_bytes,
        planned_bytes=planned,
        memory_limit_bytes=memory.usable,
        panics=panics,
        is_sound=not counts.n_different
        and not panics
        and counts.active_bytes <= planned
        and counts.kv_bytes <= last.kv_budget_bytes,
    )
