"""J2, J3: modes over real supervisors and real worker processes."""

import json
import os
import signal
from pathlib import Path

import httpx
import openai
import pytest

from mlxstack.control import start
from mlxstack.control.mode_switch import requests_of
from mlxstack.core.preset import AUTO, Preset
from mlxstack.host.home import Home
from mlxstack.host.services import read_json
from tests.cli.terminal import Shell
from tests.patience import PATIENCE_S
from tests.ports import unused_port

pytestmark = pytest.mark.net

MODES = {"day", "night", "alone", "bad", "demo-mode"}


@pytest.fixture
def modes(shell: Shell) -> Path:
    """`day` is chat and embed, `night` is chat and watch."""
    folder = shell.home / "presets" / "modes"
    folder.mkdir(parents=True, mode=0o700)
    for name in ("chat", "embed", "watch"):
        (shell.home / "presets" / f"{name}.yaml").write_text(
            f"extends: demo\nserver: {{port: {shell.port}, drain_s: 1, startup_timeout_s: 120}}\n"
        )
    members = {"day": ("chat", "embed"), "night": ("chat", "watch")}
    for name, names in members.items():
        lines = "".join(f"  - preset: {one}\n" for one in names)
        (folder / f"{name}.yaml").write_text(f"description: By {name}.\nmembers:\n{lines}")
    return folder


def pids(shell: Shell) -> dict[str, int]:
    """Workers of the members that are healthy."""
    return {
        name: one["worker_pid"]
        for name, one in shell.services().items()
        if one["state"] == "healthy" and name not in MODES
    }


def fronts(shell: Shell) -> dict[str, str]:
    """Gateways that are healthy, with their addresses."""
    return {
        name: one["url"]
        for name, one in shell.services().items()
        if one["state"] == "healthy" and name in MODES
    }


def test_j2_a_switch_touches_only_what_differs(shell: Shell, modes: Path) -> None:
    first = shell.run("mode", "switch", "day")
    assert first.returncode == 0, first.stderr
    url = f"http://127.0.0.1:{shell.port}"
    assert f"mode day runs at {url}" in first.stdout and fronts(shell) == {"day": url}
    day = pids(shell)
    assert set(day) == {"chat", "embed"}
    assert "Mode:   day" in shell.run("status").stdout
    second = json.loads(shell.run("mode", "switch", "night", "--json").stdout)
    assert second == {
        "mode": "night", "url": url,
        "stop": ["embed"], "start": ["watch"], "keep": ["chat"], "on_demand": [],
    }  # fmt: skip
    night = pids(shell)
    assert set(night) == {"chat", "watch"} and fronts(shell) == {"night": url}
    assert night["chat"] == day["chat"]
    told = shell.run("mode", "status", "--json")
    assert told.returncode == 0
    assert json.loads(told.stdout)["members"] == {"chat": "healthy", "watch": "healthy"}
    cards = httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"]
    assert [card["id"] for card in cards] == ["chat", "watch"]
    assert {card["status"]["value"] for card in cards} == {"loaded"}
    third = json.loads(shell.run("mode", "switch", "night", "--json").stdout)
    assert third["keep"] == ["chat", "watch"] and pids(shell) == night
    assert shell.run("down").returncode == 0
    assert shell.run("mode", "status").returncode == 1 and not pids(shell)


def test_j2_a_crashed_member_is_started_again_by_the_same_mode(shell: Shell, modes: Path) -> None:
    assert shell.run("mode", "switch", "day").returncode == 0
    before = shell.services()
    for who in ("supervisor_pid", "worker_pid"):
        os.kill(before["embed"][who], signal.SIGKILL)
    assert shell.run("mode", "status").returncode == 1
    again = json.loads(shell.run("mode", "switch", "day", "--json").stdout)
    assert (again["start"], again["keep"]) == (["embed"], ["chat"])
    after = pids(shell)
    assert after["chat"] == before["chat"]["worker_pid"]
    assert after["embed"] != before["embed"]["worker_pid"]
    assert shell.services()["day"]["worker_pid"] == before["day"]["worker_pid"]


def test_j1_j2_demo_mode_chats_and_embeds_and_its_dead_member_comes_back(shell: Shell) -> None:
    """The shipped mode with real workers; only the port is another one."""
    del shell.env["MLX_STACK_WORKER"]
    shipped = shell.run("mode", "--json")
    assert shipped.stdout == shell.run("mode", "list", "--json").stdout
    assert "demo-mode" in shipped.stdout
    folder = shell.home / "presets" / "modes"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "demo-mode.yaml").write_text(
        f"members:\n  - preset: demo\n    set: {{server.port: {shell.port}}}\n"
        "  - preset: demo-embedding\n"
    )
    started = shell.run("mode", "switch", "demo-mode")
    assert started.returncode == 0, started.stderr
    with openai.OpenAI(base_url=f"http://127.0.0.1:{shell.port}/v1", api_key="any") as client:
        said = [{"role": "user", "content": "Hello!"}]
        answer = client.chat.completions.create(model="demo", messages=said, max_tokens=8)  # type: ignore[arg-type]
        assert answer.choices[0].message.content
        before = shell.services()
        first = client.embeddings.create(model="demo-embedding", input="hello").data[0].embedding
        for who in ("supervisor_pid", "worker_pid"):
            os.kill(before["demo-embedding"][who], signal.SIGKILL)
        again = json.loads(shell.run("mode", "switch", "demo-mode", "--json").stdout)
        assert (again["start"], again["keep"]) == (["demo-embedding"], ["demo"])
        second = client.embeddings.create(model="demo-embedding", input="hello").data[0].embedding
    assert second == pytest.approx(first)
    assert pids(shell)["demo"] == before["demo"]["worker_pid"]


def test_j2_a_changed_setting_restarts_that_member_only(shell: Shell, modes: Path) -> None:
    assert shell.run("mode", "switch", "day").returncode == 0
    preset = shell.home / "presets" / "embed.yaml"
    preset.write_text(preset.read_text() + "slots: {count: 2}\n")
    again = json.loads(shell.run("mode", "switch", "day", "--json").stdout)
    assert (again["stop"], again["start"], again["keep"]) == (["embed"], ["embed"], ["chat"])
    assert shell.services()["embed"]["n_slots"] == 2


def test_a_service_of_another_way_gives_way_to_the_mode(shell: Shell, modes: Path) -> None:
    assert shell.run("up", "chat").returncode == 0
    alone = pids(shell)
    done = json.loads(shell.run("mode", "switch", "day", "--json").stdout)
    assert (done["stop"], done["keep"]) == (["chat"], [])
    assert done["url"].endswith(f":{shell.port}")
    assert set(pids(shell)) == {"chat", "embed"} and pids(shell)["chat"] != alone["chat"]


def test_j2_a_member_that_fails_brings_the_former_services_back(shell: Shell, modes: Path) -> None:
    assert shell.run("mode", "switch", "day").returncode == 0
    (modes / "bad.yaml").write_text("members:\n  - preset: watch\n  - preset: failing\n")
    (shell.home / "presets" / "failing.yaml").write_text(
        f"extends: demo\nserver: {{port: {unused_port()}, startup_timeout_s: 120}}\n"
    )
    blocked = shell.home / "presets" / "failing.yaml"
    blocked.write_text(blocked.read_text() + "slots: {save_path: /dev/null/slots}\n")
    done = shell.run("mode", "switch", "bad")
    assert done.returncode == 1
    assert "mode `bad` could not start, all is as before" in done.stderr
    assert "/dev/null/slots" in done.stderr
    assert set(pids(shell)) == {"chat", "embed"} and set(fronts(shell)) == {"day"}
    assert "Mode:   day" in shell.run("status").stdout


def test_j2_what_does_not_even_come_back_is_told_too(shell: Shell, modes: Path) -> None:
    assert shell.run("mode", "switch", "day").returncode == 0
    done = shell.run("mode", "switch", "night", WORKER_MODE="dies")
    assert done.returncode == 1
    assert "error: mode `night` could not start (`watch` did not start: " in done.stderr
    assert "what ran before did not come back (`embed` did not start: " in done.stderr
    assert set(pids(shell)) == {"chat"} and set(fronts(shell)) == {"day"}


def test_j2_memory_is_checked_before_anything_stops(shell: Shell, modes: Path) -> None:
    assert shell.run("mode", "switch", "day").returncode == 0
    before = pids(shell)
    alone = json.loads(shell.run("plan", "chat", "--json").stdout)
    usable = alone["memory"]["usable"] / alone["memory"]["total"]

    def memory(members: float) -> str:
        return f"{int(alone['wanted']['n_bytes'] * members / usable) // 1024}K"

    done = shell.run("mode", "switch", "night", MLX_STACK_MEMORY=memory(0.9))
    assert done.returncode == 5
    assert "does not fit" in done.stderr
    assert pids(shell) == before
    tight = json.loads(
        shell.run("mode", "switch", "night", "--json", MLX_STACK_MEMORY=memory(1.5)).stdout
    )
    assert (tight["start"], tight["on_demand"]) == (["chat"], ["watch"])
    assert set(pids(shell)) == {"chat"}


def test_members_that_stay_keep_their_share_and_the_others_have_the_rest(
    shell: Shell, modes: Path
) -> None:
    def share(name: str) -> float:
        preset = read_json(Home(shell.home).preset_file(name), Preset)
        assert preset is not None and preset.prefix_cache.memory_budget_pct != AUTO
        return float(preset.prefix_cache.memory_budget_pct)

    assert shell.run("mode", "switch", "day").returncode == 0
    first = share("chat")
    assert first == share("embed") > 10
    (modes / "alone.yaml").write_text("members:\n  - preset: chat\n")
    assert json.loads(shell.run("mode", "switch", "alone", "--json").stdout)["keep"] == ["chat"]
    assert share("chat") == first
    done = json.loads(shell.run("mode", "switch", "night", "--json").stdout)
    assert done["keep"] == ["chat"] and share("watch") == pytest.approx(first, rel=0.01)


def test_j3_list_and_create(shell: Shell, modes: Path) -> None:
    made = shell.run("mode", "create", "pair", "demo", "gpt-oss-20b", "--when", "Two at once.")
    assert made.returncode == 0, made.stderr
    found = json.loads(shell.run("mode", "list", "--json").stdout)["modes"]
    assert {"day", "night", "coding", "pair"} <= set(found)
    assert found["pair"] == {
        "members": [{"preset": "demo"}, {"preset": "gpt-oss-20b"}],
        "description": "Two at once.",
    }
    assert "Two at once." in shell.run("mode", "list").stdout
    assert shell.run("mode", "create", "pair", "demo").returncode == 4
    assert shell.run("mode", "create", "near", "tiny.yaml").returncode == 0
    (member,) = json.loads(shell.run("mode", "list", "--json").stdout)["modes"]["near"]["members"]
    assert member["preset"] == str(shell.preset)
    assert shell.run("mode", "create", "../out", "demo").returncode == 5


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("members:\n  - presett: chat\n", "bad.yaml:2: unknown key `members[0].presett`"),
        ("members: []\n", "at least one member"),
        ("members:\n  - preset: chat\n  - preset: chat\n", "are called `chat`"),
        ("members:\n  - preset: nobody\n", "no preset is called `nobody`"),
    ],
)
def test_j3_a_wrong_mode_is_refused_before_anything_happens(
    shell: Shell, modes: Path, text: str, complaint: str
) -> None:
    (modes / "bad.yaml").write_text(text)
    done = shell.run("mode", "switch", "bad")
    assert done.returncode == 5
    assert complaint in done.stderr
    near = shell.run("mode", "switch", "dya")
    assert "did you mean `day`?" in near.stderr


def test_j3_a_text_that_a_member_sets_is_that_text(shell: Shell, modes: Path) -> None:
    (modes / "own.yaml").write_text(
        "members:\n  - preset: chat\n"
        "    set: {name: '123', model.alias: 'a: b', server.host: '::1'}\n"
    )
    home = Home(shell.home)
    (wanted,) = requests_of("own", home)
    preset = start.resolve(wanted, home).preset
    assert (preset.name, preset.model.alias) == ("123", "a: b")
    assert preset.server.host == "::1"


def test_j3_status_without_a_mode(shell: Shell) -> None:
    assert shell.run("mode", "status").returncode == 3
