"""Real coding agents with all their tools: a tool loop, a second turn, an image.

The model is scripted, all else is as people have it: the clients of npm and their default tools,
the engine, its cache and its grammars.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct

from tests.api.running import Running
from tests.clients.agents import (
    AGAIN,
    AND_THEN,
    CODEX_EXEC,
    DONE,
    MARKER,
    N_CTX,
    SCRIPT,
    SEEN,
    TASK,
    THOUGHT,
    Start,
    asked,
    environment,
    generations,
    installed,
    n_cached,
    n_prompt,
    observed,
    offered,
    project,
    start,
)
from tests.clients.pictures import png
from tests.clients.stage import playing
from tests.repetition import in_soak

pytest.importorskip("PIL")
pytestmark = [pytest.mark.client, pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]


class Agent(Struct, frozen=True):
    """A client: arguments of its first turn, its second one, and one with an image; `{}` is text.

    It offers `tools` by default. `reuse` is the share of a prompt that the next turn repeats.
    `away` are files of a user who has another model, which `mlx-stack run` does not obey. Each
    start of a slow client costs 5 to 10 s of CPU.
    """

    name: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    image: tuple[str, ...]
    tools: frozenset[str]
    reuse: float = 0.99
    away: tuple[tuple[str, str], ...] = ()
    is_slow: bool = False


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


AWAY = "http://127.0.0.1:9/v1"
AWAY_QWEN = {
    "model": {"name": "qwen3-coder-plus"},
    "modelProviders": {
        "openai": [{"id": "qwen3-coder-plus", "baseUrl": AWAY, "envKey": "AWAY_KEY"}]
    },
    "security": {"auth": {"selectedType": "openai", "baseUrl": AWAY}},
    "env": {"OPENAI_BASE_URL": AWAY, "OPENAI_MODEL": "qwen3-coder-plus"},
}
CLAUDE = ("-p", "--dangerously-skip-permissions")
AGENTS = (
    Agent(
        "claude",
        (*CLAUDE, "{}"),
        (*CLAUDE, "--continue", "{}"),
        (*CLAUDE, "look with claude"),
        # Others are offered once ToolSearch has found them.
        names("Agent Bash Edit Read ScheduleWakeup Skill ToolSearch Workflow Write"),
    ),
    Agent(
        "codex",
        (*CODEX_EXEC, "{}"),
        ("exec", "resume", "--last", *CODEX_EXEC[1:], "{}"),
        (*CODEX_EXEC, "--image=picture.png", "what is it"),
        names("exec_command write_stdin update_goal view_image spawn_agent wait_agent close_agent"),
    ),
    Agent(
        "opencode",
        ("run", "{}"),
        ("run", "--continue", "{}"),
        ("run", "look at this", "--file", "picture.png"),
        names("bash edit glob grep read skill task todowrite webfetch write"),
        away=(("project/opencode.json", json.dumps({"model": "anthropic/claude-sonnet-4-5"})),),
        is_slow=True,
    ),
    Agent(
        "pi",
        ("-p", "{}"),
        ("-p", "--continue", "{}"),
        ("-p", "@picture.png", "look at this"),
        names("bash edit read write"),
    ),
    Agent(
        "qwen",
        ("--yolo", "{}"),
        ("--yolo", "--continue", "{}"),
        ("--yolo", "look at @picture.png"),
        names(
            "agent edit glob grep_search read_file run_shell_command skill tool_search write_file"
        ),
        # It takes the date out of the turn before.
        reuse=0.9,
        away=(("home/.qwen/settings.json", json.dumps(AWAY_QWEN)),),
        is_slow=True,
    ),
)
STARTS = [
    *((agent, Start.RUN) for agent in AGENTS),
    *((agent, Start.BY_HAND) for agent in AGENTS if not agent.is_slow),
    *in_soak(*((agent, Start.BY_HAND) for agent in AGENTS if agent.is_slow)),
]
OPENCLAW = ("agent", "--local", "--agent", "main", "--message", "{}")
ASSISTANTS = (
    Agent(
        "hermes",
        ("-z", "{}"),
        ("--continue", "-z", "{}"),
        (),
        names("clarify delegate_task execute_code memory patch read_file terminal todo write_file"),
    ),
    Agent(
        "openclaw",
        OPENCLAW,
        OPENCLAW,
        (),
        names("apply_patch browser edit exec process read sessions_spawn web_fetch write"),
    ),
)
"""Each start costs 4 to 8 s of CPU: `make clients` tests them, not every run."""


AWAY_HERMES = json.dumps(
    {
        "model": {
            "default": "gpt-4o",
            "provider": "custom",
            "base_url": AWAY,
            "api_mode": "responses",
        }
    }
)
AWAY_OPENCLAW = json.dumps({"agents": {"defaults": {"model": {"primary": "openai/gpt-4o"}}}})
"""Settings of a user that lead elsewhere."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with playing(tmp_path_factory.mktemp("agents"), SCRIPT, N_CTX, sees=True) as service:
        yield service


@pytest.mark.parametrize(("agent", "begin"), STARTS, ids=lambda value: value.name.lower())
def test_all_tools_run_and_a_second_turn_reuses(
    live: Running, agent: Agent, begin: Start, tmp_path: Path
) -> None:
    installed(agent.name)
    (project(tmp_path) / "notes.txt").write_text(MARKER)
    if begin is Start.RUN:
        for name, text in agent.away:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    with observed(live) as relay:
        task = [word.format(TASK.format(agent.name)) for word in agent.first]
        assert DONE in start(agent.name, relay.url, tmp_path, *task, begin=begin)
        call, result = generations(relay.exchanges)
        question = [word.format(AND_THEN) for word in agent.second]
        assert AGAIN in start(agent.name, relay.url, tmp_path, *question, begin=begin)
        second = generations(relay.exchanges)[2]
    assert agent.tools <= offered(call).keys()
    assert MARKER.encode() in result.body, "the client ran the tool"
    assert all(exchange.json["stream"] for exchange in (call, result, second))
    assert n_cached(result) >= 0.99 * n_prompt(call)
    assert n_cached(second) >= agent.reuse * n_prompt(result)


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_an_image_is_seen(live: Running, agent: Agent, tmp_path: Path) -> None:
    installed(agent.name)
    (project(tmp_path) / "picture.png").write_bytes(png("purple"))
    n_before = len(asked(live))
    with observed(live) as relay:
        output = start(agent.name, relay.url, tmp_path, *agent.image, begin=Start.RUN)
    assert SEEN in output
    assert asked(live, n_before)[-1].n_images == 1


@pytest.mark.soak
@pytest.mark.parametrize("agent", ASSISTANTS, ids=lambda agent: agent.name)
def test_an_assistant_takes_our_model_and_runs_a_tool(
    live: Running, agent: Agent, tmp_path: Path
) -> None:
    installed(agent.name)
    home = Path(environment(tmp_path)["HOME"])
    settings = {
        home / ".hermes" / "config.yaml": AWAY_HERMES,
        home / ".openclaw" / "openclaw.json": AWAY_OPENCLAW,
    }
    for path, text in settings.items():
        path.parent.mkdir()
        path.write_text(text)
    with observed(live) as relay:
        task = [word.format(TASK.format(agent.name)) for word in agent.first]
        assert DONE in start(agent.name, relay.url, tmp_path, *task, begin=Start.RUN)
        call, result = generations(relay.exchanges)
        question = [word.format(AND_THEN) for word in agent.second]
        assert AGAIN in start(agent.name, relay.url, tmp_path, *question, begin=Start.RUN)
        second = generations(relay.exchanges)[2]
    assert agent.tools <= offered(call).keys()
    assert MARKER.encode() in result.body, "the client ran the tool"
    assert n_cached(result) >= 0.99 * n_prompt(call)
    assert n_cached(second) >= agent.reuse * n_prompt(result)
    assert all(path.read_text() == text for path, text in settings.items())


def test_c5_opencode_echoes_the_thoughts_of_its_tool_loop(live: Running, tmp_path: Path) -> None:
    with observed(live) as relay:
        assert DONE in start("opencode", relay.url, tmp_path, "run", TASK.format("opencode"))
    _, result = generations(relay.exchanges)
    thoughts = [message.get("reasoning_content") for message in result.json["messages"]]
    assert THOUGHT in thoughts
