"""The real Claude Code against a scripted model; only where somebody installed it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxstack.host.coding_clients import CLIENTS, Endpoint
from tests.api.running import Running
from tests.clients.agents import (
    CLAUDE,
    DONE,
    N_CTX,
    SCRIPT,
    TASK,
    asked,
    claude,
    installed,
    loses_nothing,
)
from tests.clients.relay import Relay, relaying
from tests.clients.stage import playing

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

MARKS = 8
"""Tokens at most that open an answer of the demo's template."""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    installed(CLAUDE)
    with playing(tmp_path_factory.mktemp("claude"), SCRIPT, n_ctx=N_CTX) as found:
        yield found


def test_c2_a_tool_loop_goes_on_and_loses_nothing(live: Running, tmp_path: Path) -> None:
    n = len(asked(live))
    assert claude(live.url, tmp_path, TASK.format("claude"))["result"] == DONE
    assert len(asked(live, n)) == 2
    again = claude(live.url, tmp_path, "the task for claude once more", "--continue")
    assert again["result"] == DONE
    assert len(asked(live, n)) > 2
    loses_nothing(asked(live, n))


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
    main, helper = dict.fromkeys(one.agent for one in requests)
    task, sent, *rest, told = [one for one in requests if one.agent == main]
    assert not rest and len([one for one in requests if one.agent == helper]) == 1
    loses_nothing([task, sent])
    # What the helper said comes as a user turn, so the template drops the thoughts before it.
    assert task.n_prompt - told.n_cached <= MARKS


def test_a_burst_of_counts_is_answered(live: Running, tmp_path: Path) -> None:
    with relaying(Relay(live.url)) as relay:
        told = claude(relay.url, tmp_path, "/context")
    assert relay.sent.count(b"POST /v1/messages/count_tokens") > 10
    assert not told["is_error"]
    assert "Context Usage" in str(told["result"])


def test_run_takes_the_web_search_away(live: Running, tmp_path: Path) -> None:
    offered = []
    for is_ours in (False, True):
        with relaying(Relay(live.url)) as relay:
            setup = CLIENTS["claude"](Endpoint(relay.url, "local-model", N_CTX), tmp_path)
            settings = next(iter(setup.files.values())) if is_ours else "{}"
            told = claude(relay.url, tmp_path, "say hello", "--settings", settings)
        assert not told["is_error"]
        offered.append((b"WebSearch" in relay.sent, b"WebFetch" in relay.sent))
    assert offered == [(True, True), (False, True)]


def test_settings_of_the_user_lead_nowhere_else(live: Running, tmp_path: Path) -> None:
    own = tmp_path / ".claude" / "settings.json"
    own.parent.mkdir()
    away = {"ANTHROPIC_BASE_URL": "http://127.0.0.1:9", "ANTHROPIC_MODEL": "glm-5"}
    for env in (away, {"CLAUDE_CODE_USE_BEDROCK": "1", "AWS_REGION": "us-east-1"}):
        own.write_text(json.dumps({"env": env, "model": "us.anthropic.claude-sonnet-4-6"}))
        setup = CLIENTS["claude"](Endpoint(live.url, "local-model", N_CTX), tmp_path / "ours")
        settings = next(iter(setup.files.values()))
        n = len(asked(live))
        assert not claude(live.url, tmp_path, "say hello", "--settings", settings)["is_error"]
        assert len(asked(live, n)) == 1
