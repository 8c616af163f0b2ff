"""Four days in the life of a service, as tapes that are the same every time."""

from collections.abc import Iterator
from math import sin

from msgspec.structs import replace

from mlxstack.client.types import FeedLost, ListedModel, ListedModels, ModelStatus
from mlxstack.core.engine_events import CacheMiss, KVSource
from mlxstack.core.engine_snapshot import Counters, RequestPhase, SlotView, Snapshot, WaitingView
from mlxstack.core.request import Priority
from mlxstack.core.status import (
    AgentKVView,
    AgentView,
    CacheView,
    LoadView,
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

NOON = 1_780_000_000.0
GIB = 2**30
MIB = 2**20

# What a hostile or careless client may call itself.
EVIL = "[red]rm -rf[/] \x1b[31m\u202eevil\n"

FACTS = ServiceFacts(
    model="qwen2.5-coder-14b",
    architecture="qwen2",
    preset="coder",
    mode="code",
    version="0.1.0",
    health="ok",
    uptime_s=8_000.0,
    n_ctx=131_072,
    max_waiting=64,
    budget_bytes=round(12.8 * GIB),
)

DIVERGED = MissView(
    reason="diverged",
    at=1_312,
    request="chatcmpl-71c0",
    agent="opencode-2",
    age_s=41.0,
    text_shared="You are a coding agent. Today is ",
    text_cached="Tuesday, 14:02",
    text_sent="Tuesday, 14:09",
    n_lost=8_192,
    lost_s=3.412,
)

MEMORY = MemoryView(
    total_bytes=36 * GIB,
    available_bytes=round(9.6 * GIB),
    weights_bytes=round(8.2 * GIB),
    live_bytes=round(7.4 * GIB),
    parked_bytes=round(2.2 * GIB),
    workspace_bytes=round(0.9 * GIB),
    pressure="calm",
)

PREFIXES = (
    PrefixView("p1", "claude-code head", 19_840, 3_720 * MIB, 212, 7_900.0,
               ("claude-main", "claude-sub-1", "claude-sub-2"), ("memory", "disk"), True),
    PrefixView("p2", "opencode tools", 6_144, 1_152 * MIB, 88, 5_200.0,
               ("opencode-1", "opencode-2"), ("memory",)),
    PrefixView("p3", EVIL, 2_048, 384 * MIB, 3, 190.0, (EVIL,), ("disk",)),
)  # fmt: skip

CACHE = CacheView(
    memory_bytes=round(9.6 * GIB),
    memory_budget=round(12.8 * GIB),
    disk_bytes=41 * GIB,
    disk_budget=64 * GIB,
    n_entries=318,
    max_entries=1000,
    n_evicted=27,
    minute=WindowSums(14, 13, 402_000, 391_500, 163.0),
    hour=WindowSums(611, 580, 17_900_000, 17_300_000, 7_210.0),
    whole=WindowSums(1_204, 1_122, 33_600_000, 32_100_000, 13_400.0),
    prefixes=PREFIXES,
    misses=(DIVERGED, MissView("cold", None, "chatcmpl-70aa", "aider", 312.0)),
)

TURNS = tuple(
    TurnView(
        n_cached=0 if i == 0 else 19_000 + 900 * i,
        n_computed=19_000 if i == 0 else 300 + 70 * (i % 5),
        n_generated=120 + 35 * (i % 7),
        ttft_s=8.1 if i == 0 else 0.21 + 0.02 * (i % 4),
        age_s=1_900.0 - 140 * i,
        reason="cold" if i == 0 else None,
    )
    for i in range(12)
)

AGENTS = (
    AgentView("claude-main", "live", 0, Priority.HIGH, True, 31_204, 5_851 * MIB, 212, 6_100_000,
              6_010_000, 48_200, saved_s=2_504.0,
              states=(AgentKVView("qwen2.5-coder-14b", 31_204, 5_851 * MIB, "live"),
               AgentKVView("gpt-oss-20b", 12_800, 303 * MIB, "disk")), turns=TURNS),
    AgentView("opencode-2", "live", 1, Priority.NORMAL, False, 9_804, 1_838 * MIB, 88, 902_000,
              811_000, 9_100, saved_s=338.0, miss=DIVERGED),
    AgentView("aider", "parked", None, Priority.LOW, False, 5_120, 960 * MIB, 12, 61_000, 30_100,
              3_700, saved_s=12.5, idle_s=1_261.0, miss=MissView("cold")),
    AgentView(EVIL, "disk", None, Priority.NORMAL, False, 2_048, 384 * MIB, 1, 2_048, 0, 96,
              idle_s=90_061.0),
)  # fmt: skip

REQUESTS = (
    RequestView("chatcmpl-71c4", "claude-main", 0, KVSource.SLOT, 30_911, 30_640, 293, 0.0, 0.118,
                9.42, 0.131, 12.77, ended="eos", age_s=3.0, first_s=0.013),
    RequestView("chatcmpl-71c0", "opencode-2", 1, KVSource.PARKED, 9_804, 1_280, 188, 0.41, 3.551,
                6.05, 10.4, 0.53, ended="eos", age_s=41.0, miss=DIVERGED, others_s=6.4,
                restore_s=0.009, first_s=0.03),
    RequestView("chatcmpl-71bb", None, 2, KVSource.NONE, 512, 0, 16, 12.0, 0.213, 0.5, 12.22, 0.0,
                ended="cancelled", age_s=77.0, miss=MissView("cold"), first_s=0.007),
    RequestView("chatcmpl-71b2", EVIL, 2, KVSource.NONE, 2_048, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0,
                ended="failed", age_s=126.0),
)  # fmt: skip

REFUSED = tuple(
    RequestView(f"chatcmpl-72{i:02}", f"cron-{i}", n_prompt=4_000, ended="refused", age_s=i / 2)
    for i in range(30)
)

SLOTS = (
    SlotView(0, 131_072, RequestPhase.RUNNING, "chatcmpl-71c5", "claude-main", 31_204, 31_040,
             31_040, 30_911, 164, 3_932, 31.4, 5_851 * MIB, 0.0, True),
    SlotView(1, 131_072, RequestPhase.PREFILLING, "chatcmpl-71c6", "opencode-2", 6_912, 9_804,
             6_912, 1_280, 0, 4_096, 0.0, 1_296 * MIB, 0.0, True, CacheMiss("diverged", 1_312)),
    SlotView(2, 131_072, RequestPhase.COMPLETED, "chatcmpl-71b9", EVIL, 2_144, 2_048, 2_048, 0, 96,
             0, 0.0, 402 * MIB, 184.0, True, CacheMiss("cold")),
)  # fmt: skip

WAITING = (WaitingView("chatcmpl-71c7", "claude-sub-1", Priority.HIGH, 20_480, 1.8, 0),)

BUSY_COUNTERS = Counters(
    n_prompt_tokens=1_500_000,
    n_cached_tokens=32_100_000,
    n_generated_tokens=182_000,
    n_model_calls=97_000,
    n_decode_calls=95_200,
    n_decode_rows=182_000,
    n_requests=1_208,
    n_completed=1_188,
    n_cancelled=14,
    n_failed=2,
)


MEMBERS = ListedModels(
    (
        ListedModel("qwen2.5-coder-14b", ModelStatus("loaded"), 131_072, round(20.1 * GIB),
                  aliases=("coder",), resident="pinned", n_requests=611, n_active=2, n_waiting=1,
                  idle_s=0.0),
        ListedModel("qwen3.5-4b", ModelStatus("unloaded"), 65_536, round(2.2 * GIB),
                  resident="auto", n_requests=12, idle_s=2_400.0),
        ListedModel("gpt-oss-20b", ModelStatus("loading"), 65_536, round(11.2 * GIB),
                  resident="auto", n_waiting=2),
        ListedModel("minimax-m2", ModelStatus("unloaded"), 65_536, 133 * GIB, fits=False,
                  resident="auto"),
        ListedModel(EVIL, ModelStatus("unloaded"), 4_096, 31 * MIB, resident="auto"),
    )
)  # fmt: skip


def empty() -> tuple[News, ...]:
    """Just loaded: nobody has come yet."""
    slots = tuple(SlotView(i, 131_072) for i in range(3))
    snapshot = Snapshot(slots=slots, active_bytes=8 * GIB)
    facts = replace(FACTS, uptime_s=6.0)
    cache = CacheView(memory_budget=FACTS.budget_bytes, disk_budget=64 * GIB, max_entries=1000)
    memory = MemoryView(36 * GIB, 24 * GIB, round(8.2 * GIB), pressure="calm")
    return (StatusFrame(NOON, facts, snapshot, 0.0, cache, (), (), memory=memory),)


def busy() -> tuple[News, ...]:
    """Five minutes of work by three agents."""
    return tuple(_working(Snapshot(
        slots=SLOTS, waiting=WAITING, counters=BUSY_COUNTERS,
        active_bytes=17 * GIB, kv_bytes=round(7.4 * GIB),
    )))  # fmt: skip


def gateway() -> tuple[News, ...]:
    """One member of five is watched."""
    return (MEMBERS, *busy())


def overloaded() -> tuple[News, ...]:
    """Every slot taken, a long queue, no memory left, and the first refusals."""
    slots = tuple(
        replace(view, id=i, state=RequestPhase.RUNNING, n_tokens=128_000, n_cached=0, tps=4.2)
        for i, view in enumerate(SLOTS)
    )
    waiting = tuple(
        WaitingView(f"chatcmpl-8{i:03}", f"cron-{i}", Priority(i % 3), 4_000 * i, 90.0 - i)
        for i in range(1, 65)
    )
    counters = replace(BUSY_COUNTERS, n_refused=41)
    snapshot = Snapshot(
        slots=slots,
        waiting=waiting,
        counters=counters,
        active_bytes=29 * GIB,
        kv_bytes=round(12.7 * GIB),
        is_batching=False,
        why_not_batching="the self-check found other tokens in a batch than alone",
    )
    cache = replace(CACHE, memory_bytes=round(12.7 * GIB), disk_bytes=63 * GIB, n_evicted=4_211)
    frames = _working(snapshot)
    memory = replace(
        MEMORY, available_bytes=GIB, live_bytes=round(12.7 * GIB), swap_bytes=6 * GIB,
        pressure="critical",
    )  # fmt: skip
    requests = REFUSED + REQUESTS
    return tuple(replace(one, cache=cache, requests=requests, memory=memory) for one in frames)


def disconnected() -> tuple[News, ...]:
    """The service went away in the middle of its work."""
    return (*busy(), FeedLost("no answer from http://127.0.0.1:7109 (connection refused)", 0.8))


def silent() -> tuple[News, ...]:
    """A service that has no sections beside its slots."""
    return tuple(
        replace(one, cache=None, agents=None, requests=None)
        for one in busy()
        if isinstance(one, StatusFrame)
    )


def loading() -> tuple[News, ...]:
    """A model that is being loaded."""
    facts = replace(FACTS, health="loading", uptime_s=4.0)
    view = LoadView("qwen2.5-coder-14b", round(3.1 * GIB), round(8.2 * GIB), 4.0)
    return (StatusFrame(NOON, facts, Snapshot(), 0.0, memory=MEMORY, loading=view),)


def _working(last: Snapshot) -> Iterator[StatusFrame]:
    """Frames up to `last`, with waves of prefill on a stream of generated tokens."""
    n_prompt = last.counters.n_prompt_tokens - 300 * 620
    n_generated = last.counters.n_generated_tokens - 300 * 48
    n_cached = last.counters.n_cached_tokens - 300 * 800
    for second in range(301):
        n_prompt += max(0, round(900 * sin(second / 17))) if second else 0
        n_generated += round(38 + 12 * sin(second / 5)) if second else 0
        n_cached += max(0, round(2_400 * sin(second / 9))) if second else 0
        now = replace(
            last.counters,
            n_prompt_tokens=n_prompt,
            n_generated_tokens=n_generated,
            n_cached_tokens=n_cached,
        )
        facts = replace(FACTS, uptime_s=FACTS.uptime_s + second)
        snapshot = replace(last, at=500.0 + second, counters=now)
        yield StatusFrame(
            NOON + second, facts, snapshot, 0.02, CACHE, AGENTS, REQUESTS, memory=MEMORY
        )
