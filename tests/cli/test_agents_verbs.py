"""`agents` and `swap` as a person types them, against a real service."""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from msgspec import structs
from typer.testing import CliRunner, Result

from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.main import app
from mlxstack.core.errors import NotFound, SetupError
from tests import models
from tests.api.running import TINY, Running, running, tiny_preset
from tests.cli.terminal import Shell
from tests.patience import PATIENCE_S, wait_until

pytestmark = [pytest.mark.mlx, pytest.mark.net]

RULES = {"role": "system", "content": "You are a clerk who keeps a list of small things. " * 6}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service with one agent who has had two turns, and a preset of another model."""
    root = tmp_path_factory.mktemp("verbs")
    preset = tiny_preset(root / "a")
    other = models.write(root / "b", TINY, seed=2)
    (root / "home" / "presets").mkdir(parents=True)
    text = f"model: {{id: {other}, alias: other}}\nslots: {{count: 2, n_ctx: 1024}}\n"
    (root / "home" / "presets" / "other.yaml").write_text(text)
    with running(structs.replace(preset, name="tiny"), root / "home") as found:
        for text in ("remember apple", "and\x1b[31m pear"):
            body = {"append": [RULES, {"role": "user", "content": text}], "max_tokens": 4}
            httpx.post(f"{found.url}/v1/agents/ann/generate", json=body, timeout=PATIENCE_S)
        yield found


def run(here: Running, *args: str) -> Result:
    """The verb, with everything it printed."""
    return CliRunner().invoke(app, [*args, "--url", here.url])


def test_agents_are_listed_and_shown(here: Running) -> None:
    listed = run(here, "agents")
    assert listed.exit_code == 0 and "ann" in listed.stdout and "slot" in listed.stdout
    found = json.loads(run(here, "agents", "--json").stdout)["agents"]
    assert json.loads(run(here, "agents", "list", "--json").stdout)["agents"][0]["id"] == "ann"
    assert [(one["id"], one["n_requests"]) for one in found] == [("ann", 2)]
    shown = run(here, "agents", "show", "ann").stdout
    assert "KV: " in shown and "live" in shown and "MISS" in shown
    told = run(here, "agents", "history", "ann").stdout
    assert "user: remember apple" in told and "user: and\\x1b[31m pear" in told


def said(here: Running, text: str, system: str = "You are brief.") -> str:
    """One turn of a client that names no agent; the id of its agent."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": 4}
    answer = httpx.post(f"{here.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    return answer.headers["x-mlx-stack-agent"]


def test_agents_have_the_label_of_the_dashboard_and_beginnings_name_them(here: Running) -> None:
    first = said(here, "Sort the kitchen drawer")
    again = said(here, "Sort the kitchen drawer", "You are long.")
    other = said(here, "Paint the garden fence")
    found = {one["id"]: one for one in json.loads(run(here, "agents", "--json").stdout)["agents"]}
    assert found[first]["name"] == found[again]["name"] == "Sort the kitchen drawer"
    listed = [line for line in run(here, "agents").stdout.splitlines() if "kitchen" in line]
    assert first != again and len(listed) == 1 and again in listed[0], "the latest of two"
    everyone = run(here, "agents", "--all").stdout
    assert "Sort the kitchen drawer 1" in everyone and "Sort the kitchen drawer 2" in everyone
    assert run(here, "agents", "show", "paint").stdout.count(other) == 1
    assert "Paint the garden fence" in run(here, "slots").stdout
    several = CliRunner().invoke(app, ["agents", "show", "sort", "--url", here.url])
    assert isinstance(several.exception, Misuse) and first in str(several.exception)
    assert run(here, "agents", "rm", other[:-2]).stdout == f"{other} is deleted\n"


def test_a_missing_agent_names_some_and_a_conversation_has_no_history(here: Running) -> None:
    unnamed = said(here, "Water the plants")
    missing = run(here, "agents", "show", "nobody")
    assert isinstance(missing.exception, NotFound)
    assert "there is no agent nobody; there is " in str(missing.exception)
    without = run(here, "agents", "history", unnamed)
    assert "only agents that the client named have one" in str(without.exception)


def test_ages_and_shares_are_those_of_the_dashboard(here: Running) -> None:
    said(here, "Count the spoons")
    for args in (("agents",), ("slots",), ("agents", "show", "ann")):
        shown = run(here, *args).stdout
        assert not re.search(r"\d (s|ms|%)(?= |$)", shown, re.M), shown
    assert "idle" in run(here, "slots").stdout
    assert "completed" not in run(here, "slots").stdout


def test_an_empty_slot_is_not_saved(here: Running) -> None:
    assert run(here, "slots", "erase", "0").exit_code == 0
    refused = run(here, "slots", "save", "0", "a.bin")
    assert "slot 0 is empty" in str(refused.exception)


def test_agents_are_changed_branched_and_forgotten(here: Running) -> None:
    assert "pinned" in run(here, "agents", "pin", "ann").stdout
    assert json.loads(run(here, "agents", "pin", "ann", "--json").stdout)["id"] == "ann"
    assert run(here, "agents", "priority", "ann", "low").exit_code == 0
    assert run(here, "agents", "fork", "ann", "bea").exit_code == 0
    assert "has 3 messages" in run(here, "agents", "rewind", "bea", "3").stdout
    kept = json.loads(run(here, "agents", "history", "bea", "--json").stdout)["messages"]
    assert len(kept) == 3
    assert "evicted from memory" in run(here, "agents", "rm", "bea", "--evict-only").stdout
    found = {one["id"]: one for one in json.loads(run(here, "agents", "--json").stdout)["agents"]}
    assert (found["ann"]["is_pinned"], found["ann"]["priority"]) == (True, "low")
    assert "deleted" in run(here, "agents", "rm", "bea").stdout
    gone = run(here, "agents", "show", "bea")
    assert gone.exit_code != 0 and isinstance(gone.exception, NotFound)
    assert run(here, "agents", "pin", "ann", "--off").exit_code == 0


def test_g4_swap_prints_its_timeline(here: Running, tmp_path: Path) -> None:
    ready = run(here, "swap", "other", "--prepare")
    assert ready.exit_code == 0 and "is here and whole" in ready.stdout
    done = run(here, "swap", "other")
    assert done.exit_code == 0, done.exception
    steps = [line.split()[0] for line in done.stdout.splitlines()[1:6]]
    assert steps == ["drain", "park", "unload", "load", "warm"]
    assert "tiny was changed for other" in done.stdout
    refused = run(here, "swap", str(tmp_path / "nothing.yaml"))
    assert isinstance(refused.exception, SetupError) and "nothing.yaml" in str(refused.exception)


def test_g3_g5_a_killed_worker_comes_back_with_the_model_it_had(
    shell: Shell, tmp_path: Path
) -> None:
    shell.env.pop("MLX_STACK_WORKER")
    other = models.write(tmp_path / "b", TINY, seed=2)
    (shell.home / "presets").mkdir(parents=True)
    text = f"model: {{id: {other}, alias: other}}\nslots: {{count: 2, n_ctx: 512}}\n"
    (shell.home / "presets" / "other.yaml").write_text(text)
    up = shell.up()
    assert up.returncode == 0, up.stderr
    try:
        assert shell.run("swap", "other").returncode == 0
        assert shell.services()["tiny"]["total_ctx"] == 1024
        assert "serves other" in shell.run("status").stdout
        os.kill(shell.services()["tiny"]["worker_pid"], signal.SIGKILL)
        assert shell.run("up", str(shell.preset), "--if-needed").returncode == 0
        assert _model(shell) == "other"
    finally:
        shell.run("down")


def _model(shell: Shell) -> str:
    """What answers, once it answers again."""

    def found() -> str:
        with suppress(httpx.TransportError):
            answer = httpx.get(f"http://127.0.0.1:{shell.port}/props")
            if answer.is_success:
                return str(answer.json()["model_alias"])
        return ""

    return wait_until(found, "nobody answers")
