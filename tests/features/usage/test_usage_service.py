"""A real service: usage equals `/requests`, also after a restart; the daily limit under a loop."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from mlxstack.cli.commands import status
from mlxstack.cli.main import app
from mlxstack.core.preset import DiskSpec, PrefixCacheSpec
from mlxstack.host.home import HOME_VARIABLE
from mlxstack.store.write_counter import WriteCounter
from tests.api.running import Running, running, tiny_preset
from tests.patience import PATIENCE_S

WORDS = " ".join(f"word{n}" for n in range(60))
LIMIT = 1_000_000
FIELDS = ("n_prompt", "n_cached", "n_generated")


def chat(live: Running, agent: str, messages: list[dict[str, str]]) -> dict[str, str]:
    body = {"messages": messages, "agent": agent, "max_tokens": 6, "temperature": 0}
    headers = {"user-agent": f"client-{agent}/1.0"}
    response = httpx.post(
        f"{live.url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_S
    ).raise_for_status()
    message: dict[str, str] = response.json()["choices"][0]["message"]
    return {"role": "assistant", "content": message["content"]}


def talk(live: Running, agent: str, n_turns: int) -> list[str]:
    """Answers of an agent."""
    messages: list[dict[str, str]] = []
    for number in range(n_turns):
        messages.append({"role": "user", "content": f"{agent} {number} {WORDS}"})
        messages.append(chat(live, agent, messages))
    return [message["content"] for message in messages if message["role"] == "assistant"]


def get(live: Running, path: str) -> Any:
    return httpx.get(live.url + path, timeout=PATIENCE_S).raise_for_status().json()


def test_sums_equal_the_log_of_requests_and_survive_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = tiny_preset(tmp_path / "model")
    with running(preset, tmp_path / "home") as live:
        talk(live, "a", 2)
        talk(live, "b", 1)
        log = get(live, "/requests")
        total = get(live, "/usage")["total"]
        assert total["n_requests"] == len(log) == 3
        for field in FIELDS:
            assert total[field] == sum(request[field] for request in log)
        seconds = sum(request["ttft_s"] + request["decode_s"] for request in log)
        assert total["seconds"] == pytest.approx(seconds, abs=1e-5)  # of whole microseconds each
        clients = {row["key"]: row["n_requests"] for row in get(live, "/usage?by=client")["rows"]}
        assert clients == {"client-a": 2, "client-b": 1}
        assert httpx.get(live.url + "/usage?since=soon").status_code == 400
    with running(preset, tmp_path / "home") as live:
        talk(live, "a", 1)
        after = get(live, "/usage")["total"]
        assert after["n_requests"] == 4
        assert after["written_bytes"] >= total["written_bytes"] > 0
    # Turns are appended: each token is written once.
    stored = sum(path.stat().st_size for path in (tmp_path / "home/kv").rglob("*.safetensors"))
    (today,) = WriteCounter(tmp_path / "home/writes.sqlite3").days()
    assert stored <= today.kv_bytes <= 1.2 * stored
    # Without a service the command reads the file itself.
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "home"))
    printed = CliRunner().invoke(app, ["usage", "--by", "agent"]).output
    assert "LIST PRICE" in printed
    assert status.surveyed(None, show_all=False).written.n_bytes >= after["written_bytes"]


def test_the_daily_limit_holds_under_a_loop_of_agents_and_changes_no_answer(tmp_path: Path) -> None:
    preset = tiny_preset(tmp_path / "model")
    limited = PrefixCacheSpec(disk=DiskSpec(daily_write_bytes=LIMIT))
    with running(preset, tmp_path / "plain") as live:
        expected = [talk(live, agent, 3) for agent in "abcd"]
    for _ in range(2):  # the second service begins with the bytes of the first one
        with running(replace(preset, prefix_cache=limited), tmp_path / "limited") as live:
            assert [talk(live, agent, 3) for agent in "abcd"] == expected
            httpx.post(live.url + "/slots/0?action=save", json={"filename": "s.bin"})
            disk = get(live, "/cache")["disk"]
            assert 0 < disk["today"]["kv_bytes"] <= LIMIT == disk["max_daily_bytes"]
            assert "daily_write_bytes" in disk["trouble"]
            metrics = httpx.get(live.url + "/metrics").text
            assert "mlxstack_disk_daily_write_limit_reached 1.0" in metrics
    stored = sum(path.stat().st_size for path in (tmp_path / "limited/kv").rglob("*.safetensors"))
    assert 0 < stored <= LIMIT
