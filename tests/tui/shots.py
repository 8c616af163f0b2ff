"""Pictures for README and docs: five coding agents on a Mac with 36 GiB, as recordings."""

from collections.abc import Iterator
from math import sin

from msgspec.structs import replace

from mlxstack.core.engine_events import CacheMiss, KVSource
from mlxstack.core.engine_snapshot import Counters, RequestPhase, SlotView, Snapshot, WaitingView
from mlxstack.core.request import Priority
from mlxstack.core.status import (
    AgentKVView,
    AgentView,
    CacheView,
    MemoryView,
    MissView,
    PrefixView,
    RequestView,
    ServiceFacts,
    StatusFrame,
    TurnView,
    WindowSums,
)
from mlxstack.tui.feed import News

NOON = 1_790_000_000.0
GIB = 2**30
MIB = 2**20
PER_TOKEN = 48 * 2**10
N_CTX = 131_072
MODEL = "qwen3-coder-30b"

SHOP = "claude-9c14e0aa"
SUB = "claude-5b7720fe"
INFRA = "codex-07d1c3b2"
WEB = "opencode-e3ab1190"
LAB = "chat-62f0aa17"
NOTES = "chat-d85c01c7"  # fmt: skip
TITLES = {
    SHOP: "claude · shop-api",
    SUB: "claude · shop-web",
    INFRA: "codex · infra",
    WEB: "opencode · website",
    LAB: "qwen · lab",
    NOTES: "Summarize the meeting notes",
}

FACTS = ServiceFacts(
    model=MODEL, architecture="qwen3_moe", preset="coder", mode="code", version="0.1.0",
    health="ok", uptime_s=15_120.0, n_ctx=N_CTX, max_waiting=64, budget_bytes=round(9.5 * GIB),
)  # fmt: skip
MEMORY = MemoryView(
    total_bytes=36 * GIB,
    available_bytes=round(5.4 * GIB),
    weights_bytes=round(16.1 * GIB),
    live_bytes=round(5.9 * GIB),
    parked_bytes=round(2.4 * GIB),
    workspace_bytes=round(1.1 * GIB),
    pressure="calm",
)

CLOCK = MissView(
    reason="diverged", at=1_312, request="chatcmpl-9d40", agent=INFRA, age_s=41.0,
    text_shared="You are Codex, a coding agent. The time is ", text_cached="Tuesday, 14:02",
    text_sent="Tuesday, 14:09", n_lost=18_944, lost_s=8.1,
)  # fmt: skip
EVICTED = MissView(
    "evicted", 4_096, "chatcmpl-9c71", LAB, 268.0, n_lost=9_216, lost_s=3.9
)  # fmt: skip
NEW = MissView("new conversation", 19_840, "chatcmpl-9d52", SUB, 12.0)

SLOTS = (
    SlotView(0, N_CTX, RequestPhase.RUNNING, "chatcmpl-9d55", SHOP, 61_872, 61_260, 61_260, 60_928,
             612, 7_580, 38.2, 61_872 * PER_TOKEN, 0.0, True, None, 17.4, KVSource.SLOT),
    SlotView(1, N_CTX, RequestPhase.PREFILLING, "chatcmpl-9d56", INFRA, 41_216, 60_104, 41_216,
             1_280, 0, 8_192, 0.0, 41_216 * PER_TOKEN, 0.0, True,
             CacheMiss("diverged", 1_312, n_lost=18_944), 19.0, KVSource.PARKED),
    SlotView(2, N_CTX, RequestPhase.RUNNING, "chatcmpl-9d52", SUB, 21_207, 20_896, 20_896, 19_840,
             311, 7_881, 36.9, 21_207 * PER_TOKEN, 0.0, True,
             CacheMiss("new conversation", 19_840), 9.8, KVSource.FORK),
    SlotView(3, N_CTX, RequestPhase.COMPLETED, "chatcmpl-9d31", WEB, 9_804, 9_616, 9_616, 9_472,
             188, 0, 0.0, 9_804 * PER_TOKEN, 64.0, True),
)  # fmt: skip

WAITING = (
    WaitingView("chatcmpl-9d57", NOTES, Priority.HIGH, 2_180, 12.3, 2),
    WaitingView("chatcmpl-9d58", LAB, Priority.NORMAL, 13_440, 4.1),
)

TURNS = tuple(
    TurnView(
        n_cached=0 if i == 0 else 41_000 + 1_660 * i,
        n_computed=42_000 if i == 0 else 260 + 110 * (i % 4),
        n_generated=140 + 45 * (i % 6),
        ttft_s=18.2 if i == 0 else 0.24 + 0.03 * (i % 3),
        age_s=2_100.0 - 170 * i,
        reason="cold" if i == 0 else None,
    )
    for i in range(12)
)


def _agent(  # noqa: PLR0917
    name: str, place: str, slot: int | None, n_tokens: int, n_requests: int, saved_s: float,
    idle_s: float = 0.0, miss: MissView | None = None, turns: tuple[TurnView, ...] = (),
) -> AgentView:  # fmt: skip
    n_prompt = n_requests * n_tokens * 2 // 3
    return AgentView(
        id=name, place=place, slot=slot, n_tokens=n_tokens, n_bytes=n_tokens * PER_TOKEN,
        n_requests=n_requests, n_prompt=n_prompt, n_cached=n_prompt * 96 // 100,
        n_generated=180 * n_requests, saved_s=saved_s, idle_s=idle_s, miss=miss, turns=turns,
        is_pinned=name == SHOP,
        states=(AgentKVView(MODEL, n_tokens, n_tokens * PER_TOKEN, "live" if slot else place),),
    )  # fmt: skip


AGENTS = (
    _agent(SHOP, "live", 0, 61_872, 204, 4_020.0, turns=TURNS),
    _agent(INFRA, "live", 1, 41_216, 96, 1_884.0, miss=CLOCK),
    _agent(SUB, "live", 2, 21_207, 3, 25.0, miss=NEW),
    _agent(WEB, "live", 3, 9_804, 71, 1_402.0, 64.0),
    _agent(LAB, "parked", None, 13_312, 22, 121.0, 268.0, EVICTED),
    _agent(NOTES, "disk", None, 2_048, 2, 0.0, 5_402.0),
)

PREFIXES = (
    PrefixView("p1", "", 19_840, 19_840 * PER_TOKEN, 212, 15_000.0, (SUB, SHOP),
               ("memory", "disk"), True, "You are Claude Code, Anthropic's official CLI"),
    PrefixView("p2", "", 11_264, 11_264 * PER_TOKEN, 96, 9_400.0, (INFRA,), ("memory", "disk"),
               opening="You are Codex, a coding agent"),
    PrefixView("p3", "", 6_144, 6_144 * PER_TOKEN, 71, 5_200.0, (WEB,), ("memory",),
               opening="You are opencode, an interactive CLI tool"),
)  # fmt: skip

CACHE = CacheView(
    memory_bytes=MEMORY.live_bytes + MEMORY.parked_bytes,
    memory_budget=FACTS.budget_bytes,
    disk_bytes=23 * GIB,
    disk_budget=64 * GIB,
    n_entries=204,
    max_entries=1000,
    n_evicted=11,
    minute=WindowSums(9, 9, 402_000, 380_500, 163.0),
    hour=WindowSums(311, 302, 12_900_000, 12_400_000, 5_210.0),
    whole=WindowSums(398, 385, 16_300_000, 15_650_000, 7_452.0),
    prefixes=PREFIXES,
    misses=(NEW, CLOCK, EVICTED),
)

REQUESTS = (
    RequestView("chatcmpl-9d4f", SHOP, 0, KVSource.SLOT, 60_911, 60_640, 293, 0.0, 0.118, 7.42,
                0.131, 25.8, ended="eos", age_s=3.0, restore_s=0.001, first_s=0.012),
    RequestView("chatcmpl-9d31", WEB, 3, KVSource.PARKED, 9_616, 9_472, 188, 0.41, 0.151, 5.05,
                0.57, 3.9, ended="eos", age_s=64.0, restore_s=0.002, first_s=0.007),
    RequestView("chatcmpl-9d40", INFRA, 1, KVSource.PARKED, 20_104, 1_280, 240, 0.0, 8.05, 6.31,
                9.43, 0.5, ended="eos", age_s=41.0, miss=CLOCK, others_s=1.24, beside_s=0.11,
                first_s=0.03),
    RequestView("chatcmpl-9c71", LAB, 2, KVSource.PARKED, 13_312, 4_096, 96, 1.9, 3.9, 2.4, 5.81,
                1.7, ended="eos", age_s=268.0, miss=EVICTED, first_s=0.01),
)  # fmt: skip

COUNTERS = Counters(
    n_prompt_tokens=650_000, n_cached_tokens=15_650_000, n_generated_tokens=71_900,
    n_model_calls=38_100, n_decode_calls=36_900, n_decode_rows=71_900, n_requests=400,
    n_completed=396,
)  # fmt: skip


def working() -> tuple[News, ...]:
    """Five minutes in the afternoon: two agents write, one prefills, two requests wait."""
    return tuple(_frames())


def _frames() -> Iterator[StatusFrame]:
    n_prompt = COUNTERS.n_prompt_tokens - 150_000
    n_cached = COUNTERS.n_cached_tokens - 900_000
    n_generated = COUNTERS.n_generated_tokens - 22_000
    for second in range(301):
        n_prompt += (2_100 if second > 281 else max(0, round(700 * sin(second / 11)))) * bool(
            second
        )
        n_cached += 42_000 if second % 14 == 5 else 0
        n_generated += round(71 + 9 * sin(second / 6)) if second else 0
        counters = replace(
            COUNTERS, n_prompt_tokens=n_prompt, n_cached_tokens=n_cached,
            n_generated_tokens=n_generated,
        )  # fmt: skip
        snapshot = Snapshot(
            at=900.0 + second, slots=SLOTS, waiting=WAITING, counters=counters,
            active_bytes=round(25.5 * GIB), kv_bytes=MEMORY.live_bytes,
            kv_budget_bytes=FACTS.budget_bytes,
        )  # fmt: skip
        yield StatusFrame(
            at=NOON + second, service=replace(FACTS, uptime_s=FACTS.uptime_s + second),
            snapshot=snapshot, snapshot_age_s=0.02, cache=CACHE, agents=AGENTS, requests=REQUESTS,
            n_agents=len(AGENTS), memory=MEMORY, titles=TITLES,
        )  # fmt: skip
