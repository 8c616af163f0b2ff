"""`bench dev gateway`: requests through a gateway, and to its member."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml
from msgspec import Struct

from mlxstack.bench.dev.steal import TRIES, told, undisturbed
from mlxstack.bench.dev.timed_request import TimedClient
from mlxstack.bench.report import ReportTable, Results, at_least, at_most
from mlxstack.bench.servers import HOST, Sandbox, ServerUnderTest
from mlxstack.bench.statistics import lasting, megabytes, percentile, ratio, spread
from mlxstack.core.errors import Broken
from mlxstack.core.preset import Preset
from mlxstack.host.home import Home
from mlxstack.host.process import free_port
from mlxstack.host.services import owner, read_json

SHORT = {"content": "hello"}
STORY = {"messages": [{"role": "user", "content": "tell me a story"}], "ignore_eos": True}
ADDED_MS = 1.0
THROUGHPUT = 0.98
IDLE_BYTES = 200e6


class GatewayBenchPlan(Struct, frozen=True):
    """Plan: `n_short` requests, `passes` rounds of `n_streams` streams, each also direct."""

    passes: int = 3
    n_short: int = 400
    n_streams: int = 4
    n_tokens: int = 200
    n_idle: int = 1000
    tries: int = TRIES


SMALL = GatewayBenchPlan(1, 20, 2, 20, 20, 1)


class Measured(Struct):
    """Samples of one way: short requests' seconds, streams' rates."""

    short_s: list[float] = []
    rates: list[float] = []


async def run(stage: Sandbox, plan: GatewayBenchPlan) -> Results:
    """Measure both ways in turn, then hold idle streams. Raises Broken."""
    async with _served(stage, plan) as (through, direct, gateway):
        by_way = {"direct": Measured([], []), "gateway": Measured([], [])}
        ways = (("direct", direct), ("gateway", through))
        stage.say("short requests and streams, in turn")
        for _, way in ways:
            await _short(way, plan.n_short // 10 + 1)
            await _rate(way, plan)

        async def one_pass() -> dict[str, Measured]:
            now = {name: Measured([], []) for name in by_way}
            for _ in range(10):
                for name, way in ways:
                    now[name].short_s += await _short(way, plan.n_short // 10)
            for name, way in ways:
                now[name].rates.append(await _rate(way, plan))
            return now

        shares = []
        for _ in range(plan.passes):
            now, share = await undisturbed(one_pass, plan.tries)
            shares.append(share)
            for name, measured in now.items():
                by_way[name].short_s += measured.short_s
                by_way[name].rates += measured.rates
        stage.say(f"{plan.n_idle} idle streams")
        idle = await _idle_bytes(through, plan.n_idle, gateway)
    return _results(by_way, idle, plan, told(shares))


def _results(
    by_way: dict[str, Measured], idle: int, plan: GatewayBenchPlan, disturbance: str
) -> Results:
    medians = {name: percentile(measured.short_s, 50) for name, measured in by_way.items()}
    rates = {name: spread(measured.rates).median for name, measured in by_way.items()}
    rows = tuple(
        (name, lasting(measured.short_s), f"{rates[name]:.0f} tokens/s")
        for name, measured in by_way.items()
    )
    streams = f"{plan.n_streams} streams of {plan.n_tokens} tokens"
    heads = ("Way", "POST /tokenize", streams)
    table = ReportTable("Through the gateway", heads, rows, disturbance)
    held = ReportTable(
        "Idle streams", ("Streams", "Memory of the gateway"), ((str(plan.n_idle), megabytes(idle)),)
    )
    added_ms = 1e3 * (medians["gateway"] - medians["direct"])
    return Results(
        (table, held),
        (
            at_most("latency added at the median", added_ms, ADDED_MS, "ms"),
            at_least(
                "throughput against direct", ratio(rates["gateway"], rates["direct"]), THROUGHPUT
            ),
            at_most(f"{plan.n_idle} idle streams", idle / 1e6, IDLE_BYTES / 1e6, "MB"),
        ),
        {
            **{f"{name}: short s": tuple(measured.short_s) for name, measured in by_way.items()},
            **{f"{name}: tokens/s": tuple(measured.rates) for name, measured in by_way.items()},
            "idle bytes": (float(idle),),
        },
    )


async def _short(way: ServerUnderTest, n: int) -> list[float]:
    """Seconds of each of `n` requests that compute nothing, on one connection."""
    key = {"authorization": f"Bearer {way.api_key}"}
    async with httpx.AsyncClient(
        base_url=way.url, headers=key, timeout=300, trust_env=False
    ) as http:
        (await http.post("/tokenize", json=SHORT)).raise_for_status()
        taken = []
        for _ in range(n):
            began = time.perf_counter()
            await http.post("/tokenize", json=SHORT)
            taken.append(time.perf_counter() - began)
    return taken


async def _rate(way: ServerUnderTest, plan: GatewayBenchPlan) -> float:
    """Tokens per second of all streams together."""
    async with TimedClient(way) as caller:
        began = time.perf_counter()
        streams = [caller.request(STORY, plan.n_tokens) for _ in range(plan.n_streams)]
        done = await asyncio.gather(*streams)
        return sum(request.usage.completion_tokens for request in done) / (
            time.perf_counter() - began
        )


async def _idle_bytes(way: ServerUnderTest, n: int, gateway: int) -> int:
    """Gateway's resident memory while `n` streams wait at its member."""
    limits = httpx.Limits(max_connections=n + 1)
    key = {"authorization": f"Bearer {way.api_key}"}
    body = {**STORY, "stream": True, "max_tokens": 3000, "model": way.model}
    async with httpx.AsyncClient(
        base_url=way.url, headers=key, timeout=120, limits=limits, trust_env=False
    ) as http:
        begun = asyncio.Semaphore(0)
        leave = asyncio.Event()

        async def hold() -> None:
            async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                answer.raise_for_status()
                begun.release()
                await leave.wait()

        streams = [asyncio.create_task(hold()) for _ in range(n)]
        try:
            async with asyncio.timeout(300):
                for _ in range(n):
                    await begun.acquire()
            return int(psutil.Process(gateway).memory_info().rss)
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)


@asynccontextmanager
async def _served(
    stage: Sandbox, plan: GatewayBenchPlan
) -> AsyncIterator[tuple[ServerUnderTest, ServerUnderTest, int]]:
    """Gateway over two members; clients with it and without."""
    home = Home(stage.folder / "home")
    files = [str(_preset(stage, name, plan)) for name in ("bench", "other")]
    env = {**stage.env, "MLX_STACK_HOME": str(home.root)}
    process = await asyncio.to_thread(
        _command, env, "up", *files, "--port", str(free_port(HOST)), "--json"
    )
    try:
        through = ServerUnderTest("gateway", process["url"], "bench", "any")
        await _short(through, 1)
        state = owner(home, "bench")
        preset = read_json(home.preset_file("bench"), Preset)
        if state is None or preset is None:
            raise Broken("the member of the gateway does not run")
        first = preset.server.api_keys[0]
        key = first if isinstance(first, str) else first.key
        yield (
            through,
            ServerUnderTest("direct", state.spec.url, "bench", key),
            process["worker_pid"],
        )
    finally:
        await asyncio.to_thread(_command, env, "down", "--json")


def _preset(stage: Sandbox, name: str, plan: GatewayBenchPlan) -> Path:
    file = stage.folder / f"{name}.yaml"
    content = {
        "name": name,
        "model": {"id": stage.model, "alias": name},
        "slots": {"count": plan.n_streams, "n_ctx": 4096},
        "queue": {"max_waiting": plan.n_idle + 10},
    }
    file.write_text(yaml.safe_dump(content))
    return file


def _command(env: dict[str, str], *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "mlxstack.cli.main", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Broken(f"`mlx-stack {words[0]}` failed: {done.stderr.strip()}")
    status: dict[str, Any] = json.loads(done.stdout)
    return status
