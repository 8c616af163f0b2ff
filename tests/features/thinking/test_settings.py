"""Settings of an agent: set by the command, in force, and there again after a restart."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs
from typer.testing import CliRunner

from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.main import app
from mlxstack.core.preset import ModelSpec, Preset, SamplingSpec, ServerSpec, SlotSpec
from mlxstack.core.request import Priority
from tests.api.running import Running, running
from tests.api.test_serve import process, wait_for
from tests.patience import PATIENCE_S
from tests.ports import unused_port

pytestmark = [pytest.mark.mlx, pytest.mark.net]

PRESET = Preset(
    model=ModelSpec(id="demo"),
    name="demo",
    slots=SlotSpec(count=2, n_ctx=1024),
    server=ServerSpec(port=0),
    sampling=SamplingSpec(temperature=0),
)
ASKED = [{"role": "user", "content": "which city is the capital of France? think"}]
SET = ("--thinking", "6", "--effort", "low", "--max-context", "1k", "--priority", "high")
SETTINGS = {"thinking_budget": 6, "effort": "low", "max_context": 1024, "priority": "high"}


def agents(url: str, *arguments: str) -> Any:
    """JSON of the verb `agents`."""
    done = CliRunner().invoke(app, ["agents", *arguments, "--url", url, "--json"])
    assert done.exit_code == 0, done.exception
    return json.loads(done.stdout)


def answer(url: str, **more: Any) -> Any:
    body = {"messages": ASKED, "max_tokens": 60, "agent": "ann", **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()


def named(url: str, messages: list[dict[str, str]]) -> str:
    """Agent of a conversation that names none."""
    body = {"messages": messages, "max_tokens": 4}
    answered = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    return answered.headers["x-mlx-stack-agent"]


def settings_of(agent: Any) -> Any:
    return {name: agent[name] for name in SETTINGS}


def test_settings_are_in_force_after_a_restart(tmp_path: Path) -> None:
    port = unused_port()
    preset = structs.replace(PRESET, server=ServerSpec(port=port))
    url = f"http://127.0.0.1:{port}"
    with process(preset, tmp_path):
        wait_for(url)
        assert answer(url)["usage"]["completion_tokens_details"]["reasoning_tokens"] > 7
        assert settings_of(agents(url, "set", "ann", *SET)) == SETTINGS
        changed = agents(url, "set", "ann", "--effort", "default")
        assert settings_of(changed) == SETTINGS | {"effort": None}
        implicit = named(url, ASKED)
        assert settings_of(agents(url, "set", implicit, *SET)) == SETTINGS
    with process(preset, tmp_path):
        wait_for(url)
        listed = {agent["id"]: settings_of(agent) for agent in agents(url)["agents"]}
        assert listed == {"ann": SETTINGS | {"effort": None}, implicit: SETTINGS}
        assert answer(url)["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 7
        later = [*ASKED, {"role": "assistant", "content": "Paris."}, ASKED[0]]
        assert named(url, later) == implicit
        bound = httpx.get(f"{url}/requests").json()[0]["thinking"]
        assert (bound["budget"], bound["budget_by"]) == (6, "agent")
        agents(url, "set", implicit, *(word for name in SET[::2] for word in (name, "default")))
    assert not list(tmp_path.rglob("settings.json"))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with running(PRESET, tmp_path_factory.mktemp("home")) as service:
        answer(service.url)
        yield service


def test_a_prompt_beyond_the_agents_context_is_refused_as_beyond_a_slot(live: Running) -> None:
    agents(live.url, "set", "ann", "--max-context", "64")
    refused = answer(live.url, messages=[{"role": "user", "content": "word " * 80}])["error"]
    assert refused["code"] == "context_length_exceeded" and refused["n_ctx"] == 64
    cut = answer(live.url, max_tokens=None, ignore_eos=True)
    assert cut["usage"]["total_tokens"] == 64
    assert cut["choices"][0]["finish_reason"] == "length"
    agents(live.url, "set", "ann", "--max-context", "default")
    longer = answer(live.url, max_tokens=90, ignore_eos=True)
    assert longer["usage"]["total_tokens"] > 64


def test_a_stored_priority_is_that_of_the_request(live: Running) -> None:
    agents(live.url, "set", "ann", "--priority", "low")
    answer(live.url)
    slot = agents(live.url, "show", "ann")["slot"]
    assert live.service.request_log.last_in_slot[slot].priority is Priority.LOW
    agents(live.url, "set", "ann", "--priority", "default")
    assert live.service.agent_registry.settings("ann").priority is None


def test_the_list_and_why_name_what_holds(live: Running) -> None:
    agents(live.url, "set", "ann", "--thinking", "6", "--effort", "low")
    answer(live.url)
    shell = CliRunner()
    listed = shell.invoke(app, ["agents", "--url", live.url]).stdout
    assert "SETTINGS" in listed and "thinking 6, effort low" in listed
    shown = shell.invoke(app, ["agents", "show", "ann", "--url", live.url]).stdout
    assert "settings: thinking at most 6 tokens, effort low" in shown
    why = shell.invoke(app, ["cache", "why", "ann", "--url", live.url]).stdout
    assert "thinking: at most 6 tokens (agent), effort low (agent)" in why


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--effort", "lots"), "known are none, minimal"),
        (("--thinking", "-2"), "thinking_budget is -2"),
        (("--max-context", "5"), "max_context is '5'"),
        (("--priority", "urgent"), "known are high"),
    ],
)
def test_other_values_are_refused_with_those_that_there_are(
    live: Running, arguments: tuple[str, ...], message: str
) -> None:
    done = CliRunner().invoke(app, ["agents", "set", "ann", *arguments, "--url", live.url])
    assert done.exit_code != 0 and message in str(done.exception)


def test_nothing_to_set_is_a_misuse(live: Running) -> None:
    done = CliRunner().invoke(app, ["agents", "set", "ann", "--url", live.url])
    assert isinstance(done.exception, Misuse) and "--thinking" in str(done.exception)
