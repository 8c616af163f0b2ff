"""The wall clock jumps while a service serves: `python -m tests.endurance.clock SEED ROUNDS`.

A year forwards, a day backwards, and back to the right time, at random, between turns of agents.
Every greedy answer is the one from cold, no age is negative, and a sweep of what is older than a
month deletes nothing that an agent of this hour has.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.preset import Preset
from tests.api.running import running
from tests.endurance.damaged import PRESET

AGENTS = ("ann", "bob", "eve")
DAY_S = 86400.0
PATHS = ("/requests", "/v1/agents", "/cache")
OFFSETS = (365 * DAY_S, -DAY_S, 0.0)


class ClockOutcome(Struct, frozen=True):
    """Rounds, jumps of the clock, answers compared, ages looked at."""

    n_rounds: int = 0
    n_jumps: int = 0
    n_compared: int = 0
    n_ages: int = 0


def clock(home: Path, seed: int, n_rounds: int, preset: Preset = PRESET) -> ClockOutcome:
    """As many rounds, each with a jump, turns of all agents, a sweep and a look at all ages."""
    random = Random(seed)
    outcome = ClockOutcome()
    histories: dict[str, list[dict[str, str]]] = {}
    with (
        jumping() as offset,
        running(preset, home) as live,
        httpx.Client(base_url=live.url, timeout=120) as http,
    ):
        for number in range(n_rounds):
            before = offset[0]
            for agent in AGENTS:
                histories[agent] = _turn(http, agent, histories.get(agent, []), random)
            _saved(http, preset.slots.count)
            offset[0] = OFFSETS[number % len(OFFSETS)]
            swept = http.post("/cache/gc", json={"max_age_s": 30 * DAY_S}).raise_for_status().json()
            assert not swept["victims"], f"{offset} after {before}: {swept}"
            for agent in AGENTS:
                histories[agent] = _turn(http, agent, histories[agent], random)
            listed = {card["id"] for card in http.get("/v1/agents").json()["data"]}
            assert listed >= set(AGENTS)
            ages = [age for path in PATHS for age in _ages(http.get(path).json())]
            ages += _ages(_frame(http))
            assert ages and min(ages) >= 0, f"{offset}: {ages}"
            outcome = replace(
                outcome,
                n_rounds=number + 1,
                n_jumps=outcome.n_jumps + (offset[0] != before),
                n_compared=outcome.n_compared + 2 * len(AGENTS),
                n_ages=outcome.n_ages + len(ages),
            )
    return outcome


@contextmanager
def jumping() -> Iterator[list[float]]:
    """The wall clock of this process is off by the seconds of this list."""
    offset = [0.0]
    now = time.time
    now_ns = time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + offset[0])
        patch.setattr(time, "time_ns", lambda: now_ns() + int(offset[0] * 1e9))
        yield offset


def _turn(
    http: httpx.Client, agent: str, past: list[dict[str, str]], random: Random
) -> list[dict[str, str]]:
    new = {"role": "user", "content": f"What is stone {random.randrange(1000)}? " * 20}
    messages = [*past, new] if len(past) < 9 else [new]
    body = {"messages": messages, "max_tokens": 6, "temperature": 0}
    cold = http.post("/v1/chat/completions", json={**body, "cache_prompt": False})
    answer = http.post("/v1/chat/completions", json={**body, "agent": agent})
    warm, expected = (
        reply.raise_for_status().json()["choices"][0]["message"] for reply in (answer, cold)
    )
    assert warm == expected
    return [*messages, {"role": "assistant", "content": warm["content"]}]


def _saved(http: httpx.Client, n_slots: int) -> None:
    for slot in range(n_slots):
        body = {"filename": f"{slot}.bin"}
        http.post(f"/slots/{slot}", params={"action": "save"}, json=body).raise_for_status()


def _frame(http: httpx.Client) -> Any:
    """The first status frame of the event stream."""
    with http.stream("GET", "/events") as events:
        data = next(line for line in events.iter_lines() if line.startswith("data:"))
    return json.loads(data.removeprefix("data:"))


def _ages(value: Any) -> list[float]:
    """All numbers under names of ages."""
    if isinstance(value, list):
        return [age for member in value for age in _ages(member)]
    if not isinstance(value, dict):
        return []
    ages = [age for member in value.values() for age in _ages(member)]
    return ages + [value[name] for name in ("age_s", "idle_s", "uptime_s") if name in value]


if __name__ == "__main__":
    args = [int(word) for word in sys.argv[1:3]]
    print(clock(Path(tempfile.mkdtemp(prefix="clock-")), *args), flush=True)
