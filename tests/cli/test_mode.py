"""J2, J3: modes over real supervisors and real worker processes."""

import json
import os
import signal
from pathlib import Path

import openai
import pytest

from mlxstack.cli.services.mode_switch import members_of
from mlxstack.host.home import Home
from tests.cli.terminal import Shell, free_port

pytestmark = pytest.mark.net


@pytest.fixture
def modes(shell: Shell) -> Path:
    """`day` is chat and embed, `night` is chat and watch."""
    folder = shell.home / "presets" / "modes"
    folder.mkdir(parents=True, mode=0o700)
    for name in ("chat", "embed", "watch"):
        (shell.home / "presets" / f"{name}.yaml").write_text(
            f"extends: demo\nserver: {{port: {free_port()}, drain_s: 1, startup_timeout_s: 120}}\n"
        )
    members = {"day": ("chat", "embed"), "night": ("chat", "watch")}
    for name, names in members.items():
        lines = "".join(f"  - preset: {one}\n" for one in names)
        (folder / f"{name}.yaml").write_text(f"description: By {name}.\nmembers:\n{lines}")
    return folder


def pids(shell: Shell) -> dict[str, int]:
    return {
        name: one["worker_pid"]
        for name, one in shell.services().items()
        if one["state"] == "healthy"
    }


def test_j2_a_switch_touches_only_what_differs(shell: Shell, modes: Path) -> None:
    first = shell.run("mode", "switch", "day")
    assert first.returncode == 0, first.stderr
    day = pids(shell)
    assert set(day) == {"chat", "embed"}
    assert "Mode:   day" in shell.run("status").stdout
    second = json.loads(shell.run("mode", "switch", "night", "--json").stdout)
    assert second == {"mode": "night", "stop": ["embed"], "start": ["watch"], "keep": ["chat"]}
    night = pids(shell)
    assert set(night) == {"chat", "watch"}
    assert night["chat"] == day["chat"]
    told = shell.run("mode", "status", "--json")
    assert told.returncode == 0
    assert json.loads(told.stdout)["members"] == {"chat": "healthy", "watch": "healthy"}


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


def test_j1_j2_demo_mode_chats_and_embeds_and_its_dead_member_comes_back(shell: Shell) -> None:
    """The shipped mode with real workers; only the ports are other ones."""
    del shell.env["MLX_STACK_WORKER"]
    ports = {name: free_port() for name in ("demo", "demo-embedding")}
    shipped = shell.run("mode", "list", "--json")
    assert "demo-mode" in shipped.stdout
    folder = shell.home / "presets" / "modes"
    folder.mkdir(parents=True, mode=0o700)
    members = "".join(
        f"  - preset: {name}\n    set: {{server.port: {port}}}\n" for name, port in ports.items()
    )
    (folder / "demo-mode.yaml").write_text(f"members:\n{members}")
    started = shell.run("mode", "switch", "demo-mode")
    assert started.returncode == 0, started.stderr
    urls = {name: f"http://127.0.0.1:{port}/v1" for name, port in ports.items()}
    with openai.OpenAI(base_url=urls["demo"], api_key="any") as chat:
        said = [{"role": "user", "content": "Hello!"}]
        answer = chat.chat.completions.create(model="x", messages=said, max_tokens=8)  # type: ignore[arg-type]
        assert answer.choices[0].message.content
    before = shell.services()
    with openai.OpenAI(base_url=urls["demo-embedding"], api_key="any") as embedding:
        first = embedding.embeddings.create(model="x", input="hello").data[0].embedding
        for who in ("supervisor_pid", "worker_pid"):
            os.kill(before["demo-embedding"][who], signal.SIGKILL)
        again = json.loads(shell.run("mode", "switch", "demo-mode", "--json").stdout)
        assert (again["start"], again["keep"]) == (["demo-embedding"], ["demo"])
        second = embedding.embeddings.create(model="x", input="hello").data[0].embedding
    assert second == pytest.approx(first)
    assert pids(shell)["demo"] == before["demo"]["worker_pid"]


def test_j2_a_changed_setting_restarts_that_member_only(shell: Shell, modes: Path) -> None:
    assert shell.run("mode", "switch", "day").returncode == 0
    preset = shell.home / "presets" / "embed.yaml"
    preset.write_text(preset.read_text() + "slots: {count: 2}\n")
    again = json.loads(shell.run("mode", "switch", "day", "--json").stdout)
    assert (again["stop"], again["start"], again["keep"]) == (["embed"], ["embed"], ["chat"])
    assert shell.services()["embed"]["n_slots"] == 2


def test_j2_a_member_that_fails_brings_the_former_services_back(shell: Shell, modes: Path) -> None:
    assert shell.run("mode", "switch", "day").returncode == 0
    (modes / "bad.yaml").write_text("members:\n  - preset: watch\n  - preset: failing\n")
    (shell.home / "presets" / "failing.yaml").write_text(
        f"extends: demo\nserver: {{port: {free_port()}, startup_timeout_s: 120}}\n"
    )
    blocked = shell.home / "presets" / "failing.yaml"
    blocked.write_text(blocked.read_text() + "slots: {save_path: /dev/null/slots}\n")
    done = shell.run("mode", "switch", "bad")
    assert done.returncode == 1
    assert "mode `bad` could not start, all is as before" in done.stderr
    assert "/dev/null/slots" in done.stderr
    assert set(pids(shell)) == {"chat", "embed"}
    assert "Mode:   day" in shell.run("status").stdout


def test_j2_what_does_not_even_come_back_is_told_too(shell: Shell, modes: Path) -> None:
    assert shell.run("mode", "switch", "day").returncode == 0
    done = shell.run("mode", "switch", "night", WORKER_MODE="dies")
    assert done.returncode == 1
    assert done.stderr.startswith("error: mode `night` could not start (`watch` did not start: ")
    assert "what ran before did not come back (`embed` did not start: " in done.stderr
    assert set(pids(shell)) == {"chat"}


def test_j2_the_sum_is_checked_before_anything_stops(shell: Shell, modes: Path) -> None:
    assert shell.run("mode", "switch", "day").returncode == 0
    before = pids(shell)
    alone = json.loads(shell.run("plan", "chat", "--json").stdout)
    usable = alone["memory"]["usable"] / alone["memory"]["total"]
    memory = f"{int(alone['wanted']['n_bytes'] * 1.5 / usable) // 1024}K"
    done = shell.run("mode", "switch", "night", MLX_STACK_MEMORY=memory)
    assert done.returncode == 5
    assert "do not fit together" in done.stderr
    assert pids(shell) == before


def test_j3_list_and_create(shell: Shell, modes: Path) -> None:
    made = shell.run("mode", "create", "pair", "demo", "gpt-oss-20b", "--when", "Two at once.")
    assert made.returncode == 0, made.stderr
    found = json.loads(shell.run("mode", "list", "--json").stdout)["modes"]
    assert {"day", "night", "coding", "pair"} <= set(found)
    assert found["pair"] == {
        "members": [{"preset": "demo"}, {"preset": "gpt-oss-20b", "set": {"server.port": 7110}}],
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
        ("members:\n  - preset: chat\n  - preset: chat\n", "two members of this mode have name"),
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
    (part,) = members_of("own", Home(shell.home))
    assert (part.preset.name, part.preset.model.alias) == ("123", "a: b")
    assert part.preset.server.host == "::1"


def test_j3_status_without_a_mode(shell: Shell) -> None:
    assert shell.run("mode", "status").returncode == 3
