"""`up` with several models or a mode: one address; status, logs, restart and down."""

import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from mlxstack.control import gateway
from mlxstack.control.start import StartRequest
from mlxstack.gateway.spec import GatewaySpec, names_of
from mlxstack.host.hardware import this_memory
from mlxstack.host.home import Home
from mlxstack.host.services import read_json
from mlxstack.planner.memory_room import room_in
from tests import hub, models
from tests.cli.terminal import Shell
from tests.patience import PATIENCE_S
from tests.ports import unused_port

pytestmark = [pytest.mark.net, pytest.mark.slow]

HELLO = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}


def presets(shell: Shell, *names: str) -> list[str]:
    folder = shell.home / "presets"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in names:
        (folder / f"{name}.yaml").write_text(
            f"extends: demo\nserver: {{port: {shell.port}, drain_s: 1, startup_timeout_s: 120}}\n"
        )
    return list(names)


def is_passed_on(shell: Shell, model: str) -> bool:
    """Whether the tests' worker, which knows no such path, answered."""
    url = f"http://127.0.0.1:{shell.port}/v1/chat/completions"
    answer = httpx.post(url, json={**HELLO, "model": model}, timeout=PATIENCE_S)
    return answer.status_code == 404 and "not here" in answer.text


def test_several_models_have_one_address(shell: Shell) -> None:
    names = presets(shell, "one", "two")
    up = shell.run("up", *names)
    assert up.returncode == 0, up.stderr
    assert f"http://127.0.0.1:{shell.port}" in up.stdout and "one answers requests" in up.stdout
    assert set(shell.services()) == {"gateway"}
    assert shell.run("up", *names, "--if-needed", "--json").returncode == 0
    twice = shell.run("up", *names)
    assert twice.returncode == 0 and f"http://127.0.0.1:{shell.port}" in twice.stdout
    member = shell.run("up", "two")
    assert member.returncode == 0 and "two is a member of `gateway`" in member.stdout
    status = shell.run("status").stdout.splitlines()
    at = next(n for n, line in enumerate(status) if line.startswith("gateway"))
    assert "starts at its first request" in status[at + 1] and status[at + 1].startswith("  one")
    assert "0 x 0" not in status[at]
    assert is_passed_on(shell, "two")
    found = shell.services()
    assert {name: one["state"] for name, one in found.items()} == {
        "gateway": "healthy", "two": "healthy",
    }  # fmt: skip
    assert "two answers" in shell.run("logs").stdout
    alone = shell.run("up", "two", "--port", str(unused_port()))
    assert alone.returncode == 4
    os.kill(found["gateway"]["worker_pid"], signal.SIGKILL)
    assert shell.run("restart", "gateway").returncode == 0
    assert is_passed_on(shell, "one")
    down = shell.run("down", "gateway")
    assert down.returncode == 0, down.stderr
    assert "http://" not in shell.run("status").stdout
    assert "one" in shell.run("status", "--all").stdout
    assert {one["state"] for one in shell.services().values()} == {"stopped"}


def test_down_stops_the_members_of_a_killed_gateway(shell: Shell) -> None:
    assert shell.run("up", *presets(shell, "one", "two"), "--name", "pair").returncode == 0
    assert is_passed_on(shell, "one") and is_passed_on(shell, "two")
    found = shell.services()
    # This one is no member any more: it runs by itself.
    assert shell.run("down", "two").returncode == 0
    alone = shell.run("up", "two", "--port", str(unused_port()))
    assert alone.returncode == 0, alone.stderr
    for pid in (found["pair"]["supervisor_pid"], found["pair"]["worker_pid"]):
        os.kill(pid, signal.SIGKILL)
    down = shell.run("down", "pair")
    assert down.returncode == 0, down.stderr
    assert "pair had crashed" in down.stdout and "one is stopped" in down.stdout
    states = {name: one["state"] for name, one in shell.services().items()}
    assert states == {"pair": "stopped", "one": "stopped", "two": "healthy"}
    assert shell.run("down", "pair").returncode != 0
    assert shell.services()["two"]["state"] == "healthy"
    assert shell.run("down").returncode == 0


def test_a_mode_at_one_address(shell: Shell) -> None:
    presets(shell, "one", "two")
    folder = shell.home / "presets" / "modes"
    folder.mkdir(mode=0o700)
    (folder / "pair.yaml").write_text("members:\n  - preset: one\n  - preset: two\n")
    up = shell.run("up", "--mode", "pair", "--json")
    assert up.returncode == 0, up.stderr
    told = json.loads(up.stdout)
    assert told["name"] == "pair" and told["url"].endswith(f":{shell.port}")
    assert "Mode:   pair" in shell.run("status").stdout
    cards = httpx.get(told["url"] + "/v1/models", timeout=PATIENCE_S).json()["data"]
    assert [card["id"] for card in cards] == ["one", "two"]
    assert shell.run("down").returncode == 0


@pytest.mark.parametrize(
    ("args", "code", "why"),
    [
        ((), 2, "give a preset, hub id or model folder"),
        (("demo", "--mode", "coding"), 2, "give a preset, hub id or model folder"),
        (("demo", "demo-embedding", "--ctx", "1k"), 2, "go with one model"),
        (("demo", "demo"), 5, "are called `demo`"),
    ],
)
def test_refusals(shell: Shell, args: tuple[str, ...], code: int, why: str) -> None:
    refused = shell.run("up", *args)
    assert refused.returncode == code and why in refused.stderr


def test_members_that_never_fit_are_refused(shell: Shell) -> None:
    presets(shell, "one")
    folder = shell.home / "presets"
    text = (folder / "one.yaml").read_text()
    (folder / "stays.yaml").write_text(text.replace("{port", "{resident: always, port"))
    refused = shell.run("up", "one", "stays", MLX_STACK_MEMORY="200MB")
    assert refused.returncode == 5 and "do not fit" in refused.stderr


def test_members_have_the_keys_of_the_first(shell: Shell) -> None:
    presets(shell, "one", "two")
    other = shell.home / "presets" / "two.yaml"
    other.write_text(other.read_text().replace("{port", "{api_keys: [other], port"))
    refused = shell.run("up", "one", "two")
    assert refused.returncode == 5 and "other server.api_keys" in refused.stderr


def test_a_model_that_is_not_here_reserves_what_the_hub_tells(shell: Shell, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    models.write(folder, models.LLAMA)
    presets(shell, "one")
    far = (shell.home / "presets" / "one.yaml").read_text().replace("extends: demo\n", "")
    (shell.home / "presets" / "far.yaml").write_text(f"model: {{id: {hub.MODEL}}}\n{far}")
    (shell.home / "presets" / "near.yaml").write_text(f"model: {{id: {folder}}}\n{far}")

    def reserved(*names: str, **env: str) -> dict[str, int]:
        up = shell.run("up", *names, "--json", **env)
        assert up.returncode == 0, up.stderr
        cards = httpx.get(json.loads(up.stdout)["url"] + "/v1/models", timeout=PATIENCE_S).json()[
            "data"
        ]
        assert shell.run("down").returncode == 0
        assert all(card["fits"] for card in cards)
        return {card["aliases"][-1]: card["n_bytes"] for card in cards}

    with hub.serving(hub.files_of(folder)) as found:
        known = reserved("one", "far", **found.env(tmp_path / "hub"))
    near = [StartRequest(name, (), tmp_path) for name in ("one", "near")]
    home = Home(shell.home)
    planned = gateway.plan("x", near, home, room_in(home, this_memory(shell.env)))
    assert known["far"] == pytest.approx(planned.spec.members[1].n_bytes, rel=0.01)
    dead = {"HF_ENDPOINT": f"http://127.0.0.1:{unused_port()}", "HF_HOME": str(tmp_path / "none")}
    unknown = reserved("one", "far", **dead)
    spec = read_json(Home(shell.home).gateway_file("gateway"), GatewaySpec)
    assert spec is not None and unknown["far"] == spec.budget


def test_two_presets_of_one_model_are_listed_by_their_own_names(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.presets.mkdir()
    (home.presets / "two.yaml").write_text("extends: demo\n")
    wanted = [StartRequest(name, (), tmp_path) for name in ("demo", "two")]
    planned = gateway.plan("x", wanted, home, room_in(home, this_memory(os.environ)))
    assert [one.names[0] for one in planned.spec.members] == ["demo", "two"]
    assert names_of(planned.spec) == {"demo": "demo", "two": "two"}
