"""`verify`: all KV paths on real weights, against a cold run.

The engine has a temporary home; no agent of the user is read or written.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.bench.environment import Conditions, conditions, ended
from mlxstack.bench.my_service import WORDS
from mlxstack.bench.statistics import percentile, spread
from mlxstack.cli.check_result import CheckLevel, CheckResult
from mlxstack.cli.verification.probe import (
    N_ANSWER,
    EngineProbe,
    GreedyResponse,
    Say,
    chat_model,
    probe,
)
from mlxstack.core.commands import EraseSlot, RestoreSlot, SaveSlot
from mlxstack.core.engine_events import KVSource
from mlxstack.core.exact_rows import described
from mlxstack.core.formatting import size
from mlxstack.core.preset import Preset, Speculation
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Caller, Request
from mlxstack.host.hardware import MemoryBudget, this_memory
from mlxstack.host.home import Home
from mlxstack.planner.candidate import SINGLE_BYTES
from mlxstack.planner.fit import refuse_if_too_big
from mlxstack.planner.memory_room import room_in
from mlxstack.policy.kv.prefix_index import common_prefix
from mlxstack.policy.memory.capacity import Weights

N_HEAD = 384
N_OWN = 96
N_NEW = 24
"""Tokens of shared head, own rest and next turn."""

N_CTX = 4352
"""Tokens of a slot: an answer passes 4,096, and another turn follows."""
N_COMPARED = 8
"""Last tokens of a long answer that a prompt of all tokens before them must repeat."""
KV_STEP = 256
"""Tokens by which caches grow."""
MAX_SLOTS = 4
PART = 50
"""Words that are tokenized at once."""

EXACT = 1e-3
ROUNDED = 0.5
"""Tolerated log probability differences: float32 CPU, rounding GPU."""

MAX_KV = 1.05
"""Of the planned bytes: KV of windows may still grow a little."""

LATE = 1.5
"""Tolerated multiple of the stall bound, as chunk sizes adapt."""

WIDENED = (
    "half precision, and with it the scales of quantized weights, is computed in float32 on a CPU: "
    "closer to the exact answer than mlx_lm, whose tokens may differ"
)


class VerifyPlan(Struct, frozen=True):
    """Prompt lengths of the prefill curve, and decode steps per width.

    The last prompt joins decoding rows. Answers pass `long_contexts`, where MLX changes its
    attention kernels.
    """

    lengths: tuple[int, ...] = (256, 1024, 3072)
    n_steps: int = 48
    long_contexts: tuple[int, ...] = (1024, 4096)


QUICK = VerifyPlan((64, 512), 12, long_contexts=(1024,))


class VerifyReport(Struct, frozen=True):
    """`step_ms` by rows in the batch, `prefill_tps` by tokens of the prompt."""

    preset: str
    conditions: Conditions
    seconds: float
    is_sound: bool
    checks: tuple[CheckResult, ...]
    step_ms: dict[int, float]
    prefill_tps: dict[int, float]


class Verifier:
    """Plays the scenes on an engine, and collects what they find."""

    def __init__(
        self, engine_probe: EngineProbe, tolerance: float, say: Say, seed: int = 0
    ) -> None:
        self._probe = engine_probe
        self._tolerance = tolerance
        self._say = say
        self._encode = engine_probe.engine.tokenizer.encode
        self._random = Random(seed)
        self.slack = engine_probe.preset.prefix_cache.block_size
        self.n_slots = engine_probe.preset.slots.count
        self.n_ctx = engine_probe.preset.slots.n_ctx
        self.checks: list[CheckResult] = []
        self.step_ms: dict[int, float] = {}
        self.prefill_tps: dict[int, float] = {}
        self.head = self.random_tokens(N_HEAD)

    def random_tokens(self, n_tokens: int) -> tuple[int, ...]:
        """So many tokens of text that no prompt before held."""
        tokens: tuple[int, ...] = ()
        while len(tokens) < n_tokens:
            tokens += tuple(self._encode(" ".join(self._random.choices(WORDS, k=PART))))
        return tokens[:n_tokens]

    def prompt(self) -> tuple[int, ...]:
        """A new prompt behind the common head."""
        return self.head + self.random_tokens(N_OWN)

    def ask(self, tokens: Sequence[int], **more: Any) -> GreedyResponse:
        """A request that uses the cache; its head may get a checkpoint."""
        return self._probe.ask(tokens, checkpoint_positions=(N_HEAD,), **more)

    def rows(self, n_rows: int, n_steps: int) -> list[str]:
        """Submit requests that decode together; their ids."""
        prompts = (self.random_tokens(64) for _ in range(n_rows))
        return [self._probe.submit(prompt, n_steps, use_cache=False) for prompt in prompts]

    def reuse(
        self, name: str, tokens: Sequence[int], n_known: int, source: KVSource, **more: Any
    ) -> None:
        """Ask, and compare the answer with cold."""
        self.identity(name, tokens, self.ask(tokens, **more), n_known, source)

    def identity(
        self,
        name: str,
        tokens: Sequence[int],
        response: GreedyResponse,
        n_known: int,
        *sources: KVSource,
    ) -> None:
        """Compare with cold, and the reused tokens with those that are known."""
        cold = self._probe.cold(tokens, len(response.tokens))
        level, detail = compare(cold, response, self._tolerance)
        assigned = response.assigned
        detail += f"; {assigned.n_cached} of {n_known} known tokens reused ({assigned.source})"
        is_reused = assigned.n_cached >= n_known - self.slack or not n_known
        is_there = assigned.source in sources or not sources
        if not is_reused or not is_there:
            level = CheckLevel.BAD
            detail = f"{detail}, expected {', '.join(sources) or 'none'}"
        self.note(name, level, detail)

    def note(self, name: str, level: CheckLevel, detail: str) -> None:
        """Record a finding."""
        self._say(f"{level.value:4} {name}: {detail}")
        self.checks.append(CheckResult(level, name, detail))

    def batch(self) -> None:
        """Rows of different lengths decode together."""
        snapshot = self._probe.engine.snapshot()
        if not snapshot.is_batching:
            self.note("batch", CheckLevel.BAD, f"slot by slot: {snapshot.why_not_batching}")
            return
        self.note("equal bits", CheckLevel.OK, described(snapshot.exact))
        prompts = [self.prompt()[: N_HEAD + 20 * (1 + i)] for i in range(self.n_slots)]
        ids = [self._probe.submit(prompt, use_cache=False) for prompt in prompts]
        answers = zip(prompts, map(self._probe.response, ids), strict=True)
        for n, (tokens, response) in enumerate(answers, 1):
            self.identity(f"batch, row {n} of {len(ids)}", tokens, response, 0)

    def hits(self) -> None:
        """Repeat of a prompt, next turn, fork, parked context."""
        first = self.prompt()
        answer = self.ask(first, slot=0)
        self.reuse("same prompt again", first, len(first) - 1, KVSource.SLOT, slot=0)
        history = first + answer.tokens
        later = history + self.random_tokens(N_NEW)
        self.reuse("next turn", later, len(history) - 1, KVSource.SLOT, slot=0)
        self._probe.run(EraseSlot(1))
        self.reuse("fork", self.prompt(), N_HEAD, KVSource.FORK, slot=1)
        for slot in range(self.n_slots):
            self._probe.ask(self.random_tokens(N_OWN + N_HEAD), 4, slot=slot)
        self.reuse("parked", later, len(later) - 1, KVSource.PARKED, slot=self.n_slots - 1)

    def tenant(self) -> None:
        """Another tenant sends a prompt that is parked and live."""
        tokens = self.prompt()
        self.ask(tokens, slot=0)
        self.ask(self.random_tokens(N_HEAD), slot=0)
        self.ask(tokens, slot=1)
        self.reuse("tenant", tokens, 0, KVSource.NONE, slot=0, caller=Caller(salt="another tenant"))

    def slot_file(self) -> None:
        """A slot is saved, erased and restored."""
        tokens = self.prompt()
        history = tokens + self.ask(tokens, slot=0).tokens
        self._probe.run(SaveSlot(0, "verify.bin"))
        self._probe.ask(self.random_tokens(N_OWN), 2, slot=0, use_cache=False)
        self._probe.run(EraseSlot(0))
        self._probe.run(RestoreSlot(0, "verify.bin"))
        later = history + self.random_tokens(N_NEW)
        self.reuse("slot file", later, len(history) - 1, KVSource.SLOT, slot=0)

    def long_context(self, n_context: int) -> None:
        """An answer past a context, its tokens as prompt, another turn.

        Its tokens are decoded here and computed as a prompt there, by other attention kernels.
        """
        n_prompt = n_context - N_ANSWER // 2
        name = f"context past {n_context:,}"
        if n_prompt + 2 * N_ANSWER + N_NEW > self.n_ctx:
            detail = f"left out: slots hold {self.n_ctx:,} tokens"
            self.note(name, CheckLevel.OK, detail)
            return
        tokens = self.head + self.random_tokens(n_prompt - N_HEAD)
        answer = self.ask(tokens, slot=0)
        history = tokens + answer.tokens
        cold = self._probe.cold(history[:-N_COMPARED], N_COMPARED)
        level, detail = compare(cold, answer.last(N_COMPARED), self._tolerance)
        self.note(f"{name}, decoded", level, detail)
        later = history + self.random_tokens(N_NEW)
        self.reuse(f"{name}, next turn", later, len(history) - 1, KVSource.SLOT, slot=0)

    def early_turn(self) -> None:
        """The next turn is begun early in an idle slot."""
        tokens = self.prompt()
        first = self._probe.submit(
            tokens, slot=0, display_name="verify", checkpoint_positions=(N_HEAD,)
        )
        self._probe.response(first)
        expected = self.head + self.random_tokens(N_OWN)
        early = Request("verify-early", PromptTokens(expected), 0, slot=0, display_name="verify")
        self._probe.engine.begin_early(early, first)
        n_begun = self._probe.until_begun(0)
        later = expected + self.random_tokens(N_NEW)
        n_known = len(expected) - 1 if n_begun else len(later) + self.slack
        self.reuse("early turn", later, n_known, KVSource.SLOT, slot=0, display_name="verify")

    def drafts(self, tokens: Sequence[int], cold: GreedyResponse) -> None:
        """Right and wrong drafts, against an engine without drafts."""
        if not self._probe.engine.snapshot().is_drafting:
            self.note("drafts", CheckLevel.WARN, "the model cannot take tokens back; no drafts")
            return
        wrong = tuple(self.head[i] if i % 4 == 3 else t for i, t in enumerate(cold.tokens))
        for name, prediction in (("right", cold.tokens), ("wrong", wrong)):
            response = self._probe.ask(tokens, slot=0, use_cache=False, prediction=prediction)
            level, detail = compare(cold, response, self._tolerance)
            timings = response.timings
            detail += f"; {timings.n_accepted} of {timings.n_drafted} draft tokens accepted"
            self.note(f"drafts, {name}", level, detail)

    def curves(self, plan: VerifyPlan) -> None:
        """Step time by rows, prefill rate by tokens."""
        for n in sorted({1, 2, self.n_slots}):
            rows = [
                self._probe.response(request_id).times for request_id in self.rows(n, plan.n_steps)
            ]
            began = max(row[0] for row in rows)
            ended = min(row[-1] for row in rows)
            gaps = [b - a for row in rows for a, b in pairwise(row) if began <= a < b <= ended]
            self.step_ms[n] = 1000 * spread(gaps or [0.0]).median
        for n in plan.lengths:
            timings = self._probe.ask(self.random_tokens(n), 1, use_cache=False).timings
            self.prefill_tps[n] = timings.n_prompt / max(timings.prefill_s, 1e-9)

    def stall(self, plan: VerifyPlan) -> None:
        """A long prompt joins rows that decode."""
        bound_s = self._probe.preset.prefill.max_stall_ms / 1000
        ids = self.rows(self.n_slots - 1, 6 * plan.n_steps)
        self._probe.ask(self.random_tokens(plan.lengths[-1]), 1, use_cache=False)
        gaps = [
            b - a for request_id in ids for a, b in pairwise(self._probe.response(request_id).times)
        ]
        worst = max(gaps)
        p99 = percentile(gaps, 99)
        level = CheckLevel.WARN
        if worst <= LATE * bound_s:
            level = CheckLevel.OK
        stalls = f"longest {1000 * worst:.0f} ms, p99 {1000 * p99:.0f} ms"
        self.note("stall of decoding rows", level, f"{stalls}, bound {1000 * bound_s:.0f} ms")

    def memory(self, plan: VerifyPlan, planned: int) -> None:
        """KV bytes per token against the plan, and KV against budget."""
        n = plan.lengths[-1]
        tokens = self.random_tokens(n)
        n_bytes = []
        for length in (n // 2, n):
            self._probe.ask(tokens[:length], 1, slot=0, use_cache=False)
            n_bytes.append(self._probe.engine.snapshot().slots[0].n_bytes)
        snapshot = self._probe.engine.snapshot()
        per_token = (n_bytes[1] - n_bytes[0]) / (n - n // 2)
        n_grown = n - n // 2
        # Each of the two may have room for a whole step.
        is_planned = n_bytes[1] - n_bytes[0] <= MAX_KV * planned * (n_grown + KV_STEP)
        is_within = snapshot.kv_bytes <= snapshot.kv_budget_bytes
        self.note(
            "memory",
            CheckLevel.OK if is_planned and is_within else CheckLevel.BAD,
            f"{per_token:,.0f} bytes of KV a token, planned {planned:,}; "
            f"{size(snapshot.kv_bytes)} live of {size(snapshot.kv_budget_bytes)}",
        )


def compare(cold: GreedyResponse, warm: GreedyResponse, tolerance: float) -> tuple[CheckLevel, str]:
    """Compare tokens and log probabilities; ties within tolerance pass."""
    n = common_prefix(cold.tokens, warm.tokens)
    pairs = zip(cold.logprobs[:n], warm.logprobs[:n], strict=True)
    drift = max((abs(a - b) for a, b in pairs), default=0.0)
    if n == len(cold.tokens) == len(warm.tokens):
        level = CheckLevel.BAD
        if drift <= tolerance:
            level = CheckLevel.OK
        return level, f"{n} tokens the same, log probabilities within {drift:.2g}"
    if n == min(len(cold.tokens), len(warm.tokens)):
        return CheckLevel.BAD, f"{len(warm.tokens)} tokens instead of {len(cold.tokens)}"
    likely = dict(cold.tops[n])
    gap = abs(likely[cold.tokens[n]] - likely.get(warm.tokens[n], -1e9))
    if gap <= tolerance and drift <= tolerance:
        return CheckLevel.WARN, f"a tie at token {n}: its two likeliest are {gap:.2g} apart"
    text = "none of the two likeliest"
    if warm.tokens[n] in likely:
        text = f"{gap:.2g} less likely"
    return CheckLevel.BAD, f"token {n} differs, and is {text}; drift {drift:.2g} before"


def verified(preset: Preset) -> Preset:
    """Preset for verification: all caches on, few short slots."""
    slots = preset.slots
    n_slots = max(2, min(slots.count, MAX_SLOTS))
    cache = preset.prefix_cache
    return replace(
        preset,
        slots=replace(slots, count=n_slots, n_ctx=min(slots.n_ctx, N_CTX), save_path=None),
        prefix_cache=replace(cache, enabled=True, disk=replace(cache.disk, enabled=True)),
        speculation=Speculation.OFF,
    )


def is_widened(weights: Weights, memory: MemoryBudget) -> bool:
    """Whether numbers of half precision are computed in float32 here."""
    return memory.half_bytes == SINGLE_BYTES and weights.n_half > 0


def verify(
    preset: Preset,
    home: Path,
    planned: int,
    tolerance: float,
    say: Say,
    plan: VerifyPlan = VerifyPlan(),
) -> Verifier:
    """Run all checks, on two engines one after the other. Raises StackError."""
    preset = verified(preset)
    with probe(preset, home) as engine_probe:
        run = Verifier(engine_probe, tolerance, say)
        tokens = run.prompt()
        cold = engine_probe.cold(tokens)
        for scene in (run.batch, run.hits, run.tenant, run.slot_file, run.early_turn):
            scene()
        for n_context in plan.long_contexts:
            run.long_context(n_context)
        run.curves(plan)
        run.stall(plan)
        run.memory(plan, planned)
        history = run.prompt()
        history += engine_probe.ask(history, slot=0, caller=Caller(agent="verify")).tokens
        later = history + run.random_tokens(N_NEW)
    with probe(replace(preset, speculation=Speculation.AUTO), home) as engine_probe:
        again = Verifier(engine_probe, tolerance, say)
        again.reuse("restart", later, len(history) - 1, KVSource.DISK, slot=0)
        again.drafts(tokens, cold)
    run.checks += again.checks
    return run


def report(
    name: str, home: Home, env: Mapping[str, str], say: Say, plan: VerifyPlan
) -> VerifyReport:
    """Verify a preset or a model in a temporary home.

    Raises SetupError when it is no chat model, does not fit or does not load.
    """
    memory = this_memory(env)
    candidate = chat_model(name, home, memory)
    preset = verified(candidate.preset)
    candidate = replace(candidate, preset=preset)
    refuse_if_too_big(candidate, room_in(home, memory))
    geometry = candidate.geometry(memory.half_bytes, preset.kv.bits)
    about = conditions(preset.model.id, datetime.now(UTC).date(), env)
    began = time.monotonic()
    tolerance = ROUNDED
    if memory.half_bytes == SINGLE_BYTES:
        tolerance = EXACT
    with tempfile.TemporaryDirectory(prefix="mlx-stack-verify-") as folder:
        run = verify(preset, Path(folder), geometry.growth, tolerance, say, plan)
    if is_widened(candidate.weights, memory):
        run.note("numbers", CheckLevel.OK, WIDENED)
    return VerifyReport(
        preset=preset.name,
        conditions=ended(about),
        seconds=time.monotonic() - began,
        is_sound=all(check.verdict is not CheckLevel.BAD for check in run.checks),
        checks=tuple(run.checks),
        step_ms=run.step_ms,
        prefill_tps=run.prefill_tps,
    )
