"""kill -9 under a loop of agents, with a daily limit: usage and bytes written stay true.

Each life has one of three models: full attention, windows, recurrent layers.

python -m tests.endurance.disk_chaos MINUTES [SEED]
"""

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from subprocess import Popen

import httpx
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.config import presets
from mlxstack.core.preset import ModelSpec
from mlxstack.core.usage import UsageSums
from mlxstack.core.usage_key import UsageKey
from mlxstack.features.usage.prices import price_named, price_table
from mlxstack.features.usage.store import UsageStore
from mlxstack.host.home import Home
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.store.write_counter import WriteCounter
from tests.models import build
from tests.ports import unused_port

DAILY_BYTES_PER_MINUTE = 4_000_000
"""Bytes that may be written, in a minute of the run: less than its agents ask for."""

KINDS = ("demo", "tiny-swa", "tiny-hybrid")
MAX_TOKENS = 12
MAX_TURNS = 6
N_AGENTS = 20
LIVES_OF_AGENTS = 8
"""Lives after which other agents talk, whose KV is not on disk."""
TEXT = "the file was read and the test of the folder is green again"
FINISHED = "request finished"
REASON_HEADER = "X-MLX-Stack-Cache-Miss-Reason"
LOST_HEADER = "X-MLX-Stack-Cache-Lost-Tokens"


class DiskChaosOutcome(Struct, frozen=True):
    """Over all lives of the service."""

    n_lives: int
    n_killed: int
    n_logged: int
    """Requests in the log of all lives."""
    n_counted: int
    """Requests in the sums; those of the last moment before a kill may be missing."""
    kv_bytes: int
    n_answers: int
    has_refused: bool
    n_states_lost: int
    """Tokens that were computed again because a crash came before their checkpoint."""


class Talk(Struct, frozen=True):
    """Turns of one agent, and what they lost."""

    n_turns: int
    n_states_lost: int


def chaos(minutes: float, seed: int, home: Home) -> DiskChaosOutcome:
    """Start, talk and kill until the time is over. Raises AssertionError."""
    random = Random(seed)
    answers: dict[str, str] = {}
    n_lives = n_killed = n_answers = n_states_lost = 0
    has_refused = False
    end = time.monotonic() + 60 * minutes
    daily_bytes = round(DAILY_BYTES_PER_MINUTE * max(1.0, minutes))
    files = [_write_preset(home, kind, daily_bytes) for kind in KINDS]
    while time.monotonic() < end or n_lives < 2:
        kind = random.randrange(len(KINDS))
        url, worker = _start(home, files[kind])
        try:
            for _ in range(random.randrange(1, 12)):
                agent = f"{n_lives // LIVES_OF_AGENTS}-{random.randrange(N_AGENTS)}-{KINDS[kind]}"
                talk = _talk(url, agent, random.randrange(1, MAX_TURNS + 1), answers)
                n_answers += talk.n_turns
                n_states_lost += talk.n_states_lost
            view = httpx.get(f"{url}/cache", timeout=60).json()["disk"]
            has_refused |= bool(view["trouble"])
            assert view["today"]["kv_bytes"] <= daily_bytes, view
        finally:
            is_killed = random.random() < 0.7
            worker.send_signal(signal.SIGKILL if is_killed else signal.SIGTERM)
            worker.wait(120)
        n_lives += 1
        n_killed += is_killed
        _check(home, n_killed, daily_bytes)
    total = _total(home)
    kv_bytes = max(day.kv_bytes for day in WriteCounter(home.writes_file).days())
    logged = _logged(home)
    return DiskChaosOutcome(
        n_lives,
        n_killed,
        logged.n_requests,
        total.n_requests,
        kv_bytes,
        n_answers,
        has_refused,
        n_states_lost,
    )


def _check(home: Home, n_killed: int, daily_bytes: int) -> None:
    """Sums are at most those of the log, short of it by one request a kill."""
    total = _total(home)
    logged = _logged(home)
    assert logged.n_requests - n_killed <= total.n_requests <= logged.n_requests, (total, logged)
    if total.n_requests == logged.n_requests:
        for field in ("n_prompt", "n_cached", "n_generated"):
            assert getattr(total, field) == getattr(logged, field), (field, total, logged)
    stored = sum(entry.n_bytes for entry in DiskKVStore(home.kv).entries())
    days = WriteCounter(home.writes_file).days()
    assert stored <= sum(day.kv_bytes for day in days), (stored, days)
    assert all(day.kv_bytes <= daily_bytes for day in days), days


def _total(home: Home) -> UsageSums:
    store = UsageStore(home.usage_file)
    rows = store.sums(0.0, UsageKey.MODEL, price_named(price_table(home), None))
    total = store.total(0.0, price_named(price_table(home), None))
    assert sum(row.n_requests for row in rows) == total.n_requests
    return total


def _logged(home: Home) -> UsageSums:
    """Sums of the lines of finished requests."""
    sums = UsageSums()
    for line in (home.root / "worker.log").read_text("utf-8").splitlines():
        if FINISHED in line:
            fields = json.loads(line)["fields"]
            sums = replace(
                sums,
                n_requests=sums.n_requests + 1,
                n_prompt=sums.n_prompt + fields["prompt"],
                n_cached=sums.n_cached + fields["cached"],
                n_generated=sums.n_generated + fields["generated"],
            )
    return sums


def _write_preset(home: Home, kind: str, daily_bytes: int) -> Path:
    preset = presets.load("demo", home).preset
    cache = preset.prefix_cache
    limited = replace(cache, disk=replace(cache.disk, daily_write_bytes=daily_bytes))
    if kind != "demo":
        folder = build(home.root / "models" / kind, kind)
        preset = replace(preset, model=ModelSpec(id=str(folder)), name=kind)
    path = home.root / f"{kind}.json"
    server = replace(preset.server, port=unused_port())
    path.write_bytes(msgspec.json.encode(replace(preset, prefix_cache=limited, server=server)))
    return path


def _start(home: Home, preset: Path) -> tuple[str, Popen[bytes]]:
    """Start a worker, and wait for it."""
    url = f"http://127.0.0.1:{presets.read_resolved(preset).server.port}"
    command = [sys.executable, "-m", "mlxstack.cli.main", "serve", str(preset)]
    environment = {**os.environ, "MLX_STACK_HOME": str(home.root)}
    with (home.root / "worker.log").open("ab") as log:
        worker = Popen(command, stdout=log, stderr=log, env=environment)
    while True:
        assert worker.poll() is None, "the worker ended by itself"
        try:
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return url, worker
        except httpx.TransportError:
            pass
        time.sleep(0.2)


def _talk(url: str, agent: str, n_turns: int, answers: dict[str, str]) -> Talk:
    """Send turns of one agent; equal prompts have equal answers in all lives."""
    topic = Random(agent)
    messages = [{"role": "system", "content": " ".join(topic.choices(TEXT.split(), k=120))}]
    n_states_lost = 0
    for _ in range(n_turns):
        messages.append({"role": "user", "content": " ".join(topic.choices(TEXT.split(), k=40))})
        body = {"messages": messages, "agent": agent, "max_tokens": MAX_TOKENS, "temperature": 0}
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        content = response.raise_for_status().json()["choices"][0]["message"]["content"]
        key = json.dumps([agent, messages])
        assert answers.setdefault(key, content) == content, messages
        messages.append({"role": "assistant", "content": content})
        if response.headers.get(REASON_HEADER, "").startswith("no checkpoint"):
            n_states_lost += int(response.headers[LOST_HEADER])
    return Talk(n_turns, n_states_lost)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="disk-chaos-") as root:
        number = int(sys.argv[2]) if len(sys.argv) > 2 else 1
        outcome = chaos(float(sys.argv[1]), number, Home(Path(root)))
        print(json.dumps(msgspec.to_builtins(outcome)))
