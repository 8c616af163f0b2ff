"""The real Claude Code with all its tools against a scripted model, headless and in a terminal."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.running import Running
from tests.clients.agents import (
    AGAIN,
    AND_THEN,
    DONE,
    N_CTX,
    SCRIPT,
    TASK,
    Start,
    asked,
    claude_of_node_20,
    claude_variables,
    command,
    environment,
    generations,
    installed,
    loses_nothing,
    observed,
    offered,
    project,
    start,
)
from tests.clients.relay import Relay, relaying
from tests.clients.stage import playing, run
from tests.tui.pane import Pane

pytestmark = [pytest.mark.client, pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

MARKS = 8
"""Tokens at most that open an answer of the demo's template."""
HEADLESS = ("-p", "--output-format", "json", "--dangerously-skip-permissions")
LEFT_OUT = "tools/**/propertyNames"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    installed("claude")
    with playing(tmp_path_factory.mktemp("claude"), SCRIPT, n_ctx=N_CTX) as service:
        yield service


def claude(url: str, folder: Path, *arguments: str, begin: Start = Start.BY_HAND) -> dict[str, Any]:
    """What one headless run of Claude Code tells."""
    done = start("claude", url, folder, *HEADLESS, *arguments, begin=begin)
    return dict(json.loads(done.splitlines()[-1]))


def with_property_names(tools: dict[str, Any]) -> list[str]:
    return sorted(name for name, schema in tools.items() if "propertyNames" in json.dumps(schema))


def test_c2_a_tool_loop_goes_on_and_loses_nothing(live: Running, tmp_path: Path) -> None:
    n = len(asked(live))
    assert claude(live.url, tmp_path, TASK.format("claude"))["result"] == DONE
    assert len(asked(live, n)) == 2
    again = claude(live.url, tmp_path, "the task for claude once more", "--continue")
    assert again["result"] == DONE
    assert len(asked(live, n)) > 2
    loses_nothing(asked(live, n))


def test_all_tools_of_the_version_for_an_older_node_are_held(live: Running, tmp_path: Path) -> None:
    """npm installs 2.1.197 with Node.js 20: it defers no tools, and has `propertyNames` twice."""
    argv = [claude_of_node_20(), *HEADLESS, TASK.format("claude")]
    with observed(live) as relay:
        variables = environment(tmp_path, **claude_variables(relay.url))
        done = run(argv, project(tmp_path), **variables)
    assert json.loads(done.splitlines()[-1])["result"] == DONE
    for exchange in generations(relay.exchanges):
        assert len(offered(exchange)) >= 20
        assert with_property_names(offered(exchange)) == ["TaskCreate", "TaskUpdate"]
    # The header of a response names it only where the grammar was compiled soon.
    assert LEFT_OUT in live.service.text_processor.constraints.loose_schemas.paths


def test_all_tools_without_tool_search_are_held(live: Running, tmp_path: Path) -> None:
    """An editor's extension asks for permissions and answers over pipes."""
    options = ("-p", "--input-format=stream-json", "--output-format=stream-json", "--verbose")
    argv, variables = command("claude", live.url, tmp_path, Start.BY_HAND)
    message = {"role": "user", "content": TASK.format("claude")}
    with observed(live) as relay:
        variables |= claude_variables(relay.url) | {"ENABLE_TOOL_SEARCH": "false"}
        argv += [*options, "--permission-prompt-tool=stdio"]
        done = run(
            argv,
            project(tmp_path),
            json.dumps({"type": "user", "message": message}),
            **environment(tmp_path, **variables),
        )
    assert json.loads(done.splitlines()[-1])["result"] == DONE
    for exchange in generations(relay.exchanges):
        assert len(offered(exchange)) >= 20
        assert with_property_names(offered(exchange)) == ["AskUserQuestion"]


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_a_person_types_two_turns_and_allows_a_command(live: Running, tmp_path: Path) -> None:
    place = project(tmp_path)
    trusted = {
        "hasCompletedOnboarding": True,
        "projects": {str(place): {"hasTrustDialogAccepted": True}},
    }
    with observed(live) as relay:
        argv, variables = command("claude", relay.url, tmp_path, Start.RUN)
        variables = environment(tmp_path, **variables)
        (tmp_path / "home" / ".claude.json").write_text(json.dumps(trusted))
        pane = Pane(place, argv, variables)
        try:
            pane.shows("manual mode")
            pane.write("task for a file")
            pane.press("Enter")
            pane.shows("Do you want to proceed?")
            pane.press("Enter")
            pane.shows(DONE)
            pane.write(AND_THEN)
            pane.press("Enter")
            pane.shows(AGAIN)
        finally:
            pane.close()
    assert (place / "marker.txt").read_text() == "MARKER_42\n"
    call, *_ = generations(relay.exchanges)
    assert with_property_names(offered(call)) == ["AskUserQuestion"]
    assert LEFT_OUT in live.service.text_processor.constraints.loose_schemas.paths
    loses_nothing(asked(live)[-3:])


def test_c1_another_conversation_reuses_tools_and_system(live: Running, tmp_path: Path) -> None:
    claude(live.url, tmp_path, TASK.format("claude"))
    n = len(asked(live))
    claude(live.url, tmp_path, "another " + TASK.format("claude"))
    first = asked(live, n)[0]
    assert first.n_cached > 0.5 * first.n_prompt


def test_a20_a_tool_search_loses_nothing(live: Running, tmp_path: Path) -> None:
    n = len(asked(live))
    assert claude(live.url, tmp_path, TASK.format("a search"))["result"] == DONE
    requests = asked(live, n)
    assert len(requests) == 2
    loses_nothing(requests)
    assert requests[1].n_prompt > requests[0].n_prompt + 100, "the found tools are described"


def test_x30_a_helper_works_beside_the_main_agent(live: Running, tmp_path: Path) -> None:
    n = len(asked(live))
    assert claude(live.url, tmp_path, TASK.format("a helper"))["result"] == DONE
    requests = asked(live, n)
    main, helper = dict.fromkeys(request.agent for request in requests)
    task, with_call, *between, last = [request for request in requests if request.agent == main]
    assert not between and len([request for request in requests if request.agent == helper]) == 1
    loses_nothing([task, with_call])
    # What the helper said comes as a user turn, so the template drops the thoughts before it.
    assert task.n_prompt - last.n_cached <= MARKS


def test_a_burst_of_counts_is_answered(live: Running, tmp_path: Path) -> None:
    with relaying(Relay(live.url)) as relay:
        reply = claude(relay.url, tmp_path, "/context")
    counts = [e for e in relay.exchanges if e.path.startswith("/v1/messages/count_tokens")]
    assert len(counts) > 10
    assert all(exchange.status == 200 for exchange in counts)
    assert not reply["is_error"]
    assert "Context Usage" in str(reply["result"])


def test_run_takes_the_web_search_away(live: Running, tmp_path: Path) -> None:
    names = []
    for begin in (Start.BY_HAND, Start.RUN):
        with observed(live) as relay:
            assert not claude(relay.url, tmp_path, "say hello", begin=begin)["is_error"]
        names.append((b"WebSearch" in relay.sent, b"WebFetch" in relay.sent))
    assert names == [(True, True), (False, True)]


def test_settings_of_the_user_lead_nowhere_else(live: Running, tmp_path: Path) -> None:
    own = Path(environment(tmp_path)["HOME"]) / ".claude" / "settings.json"
    own.parent.mkdir()
    away = {"ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "ANTHROPIC_MODEL": "glm-5"}
    for env in (away, {"CLAUDE_CODE_USE_BEDROCK": "1", "AWS_REGION": "us-east-1"}):
        own.write_text(json.dumps({"env": env, "model": "us.anthropic.claude-sonnet-4-6"}))
        n = len(asked(live))
        assert not claude(live.url, tmp_path, "say hello", begin=Start.RUN)["is_error"]
        assert len(asked(live, n)) == 1
