"""`bench` without a verb: figures of a real service that agree with its own."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mlxstack.bench.my_service import AGENTS, LENGTHS, RESERVE, ServiceSpeed, measure
from mlxstack.client.client import Client
from mlxstack.core.preset import SlotSpec
from tests.api.running import Running, running, tiny_preset
from tests.cli.terminal import CLI

pytestmark = [pytest.mark.mlx, pytest.mark.net]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("measured")
    preset = tiny_preset(folder / "model", slots=SlotSpec(count=3, n_ctx=3072))
    with running(preset, folder / "home") as found:
        yield found


def measured(live: Running, limit_s: float) -> ServiceSpeed:
    async def ask() -> ServiceSpeed:
        async with Client(live.url) as client:
            return await measure(client, limit_s, lambda _: None)

    return asyncio.run(ask())


def test_lengths_are_bounded_by_the_context_and_agents_by_the_slots(live: Running) -> None:
    before = {one["id"] for one in httpx.get(f"{live.url}/v1/agents").json()["data"]}
    found = measured(live, 300)
    assert (found.n_slots, found.n_ctx, found.n_busy) == (3, 3072, 0)
    assert [one.n_wanted for one in found.prompts] == list(LENGTHS)
    first, second, third = found.prompts
    assert abs(first.n_prompt - LENGTHS[0]) < 0.15 * LENGTHS[0]
    assert second.n_prompt > 0.8 * (3072 - RESERVE)
    assert third.skipped == "a slot holds 3072 tokens"
    for one in (first, second):
        assert one.n_warm_reused > 0.9 * one.n_prompt
        assert 0 < one.n_warm_new < 128
        assert one.prefill_tps > 0 and one.decode_tps > 0
    assert [one.n_agents for one in found.agents] == sorted({min(3, n) for n in AGENTS})
    assert all(one.total_tps >= one.each_tps > 0 for one in found.agents)
    after = {one["id"] for one in httpx.get(f"{live.url}/v1/agents").json()["data"]}
    assert after == before, "its agents are deleted"


def test_cold_prompts_reuse_nothing_even_the_second_time(live: Running) -> None:
    measured(live, 1)
    requests = live.service.request_log.requests()
    cold = [one for one in requests if one.n_prompt > 900 and one.n_cached < 900]
    assert len(cold) >= 1
    assert all(one.n_cached < 16 for one in cold), "the template's first tokens at most"


def test_a_prompt_that_would_take_too_long_is_skipped_and_said(live: Running) -> None:
    found = measured(live, 0.001)
    assert found.prompts[0].prefill_tps > 0
    assert found.prompts[1].skipped.startswith("would take about ")
    assert found.prompts[2].skipped == f"a slot holds {found.n_ctx} tokens"


def test_the_command_prints_tables_and_json(live: Running, tmp_path: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "MLX_STACK_HOME": str(tmp_path)}
    args = [*CLI, "bench", "--url", live.url, "--seconds", "1"]
    shown = subprocess.run(args, env=env, capture_output=True, text=True, check=True)
    assert "PREFILL" in shown.stdout and "AGENTS" in shown.stdout
    assert "a prompt of 1024 tokens" in shown.stderr
    told = json.loads(
        subprocess.run([*args, "--json"], env=env, capture_output=True, check=True).stdout
    )
    assert {"prompts", "agents", "n_ctx", "seconds"} <= told.keys()
    assert "Before: on " in shown.stdout and "After: on " in shown.stdout
    assert told["conditions"]["after"]["source"] in {"mains", "battery"}
