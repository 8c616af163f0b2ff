"""Real coding agents run tool loops against a scripted model; only those that are installed."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.running import Running
from tests.clients.agents import (
    CODEX,
    DONE,
    N_CTX,
    OPENCODE,
    PI,
    QWEN,
    SCRIPT,
    TASK,
    THOUGHT,
    asked,
    codex,
    installed,
    loses_nothing,
    opencode,
    started_by_us,
)  # fmt: skip
from tests.clients.relay import Relay, relaying
from tests.clients.stage import playing, run

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with playing(tmp_path_factory.mktemp("agents"), SCRIPT, n_ctx=N_CTX) as found:
        yield found


def test_codex_runs_a_tool_and_loses_nothing(live: Running, tmp_path: Path) -> None:
    installed(CODEX)
    n = len(asked(live))
    assert DONE in codex(live.url, tmp_path, TASK.format("codex"))
    assert len(asked(live, n)) == 2
    loses_nothing(asked(live, n))


def test_codex_dispatches_a_tool_of_a_namespace(live: Running, tmp_path: Path) -> None:
    installed(CODEX)
    with relaying(Relay(live.url)) as relay:
        assert DONE in codex(relay.url, tmp_path, TASK.format("a name"))
    assert b'"namespace":"multi_agent_v1"' in relay.sent
    assert b"invalid agent id nobody" in relay.sent, "it was dispatched, and failed on its own"


def test_codex_comes_back_after_a_cut_stream(live: Running, tmp_path: Path) -> None:
    installed(CODEX)
    n = len(asked(live))
    with relaying(Relay(live.url, to=b"POST /v1/responses", after=1500, cuts=1)) as relay:
        assert DONE in codex(relay.url, tmp_path, TASK.format("codex"))
    assert relay.n_cut == 1
    cut, again, last = asked(live, n)
    assert again.n_prompt == cut.n_prompt, "the cut one was sent again"
    assert again.n_cached > cut.n_cached, "what had been computed of it was kept"
    loses_nothing([again, last])


def test_c5_opencode_echoes_the_thoughts_of_its_tool_loop(live: Running, tmp_path: Path) -> None:
    installed(OPENCODE)
    n = len(asked(live))
    with relaying(Relay(live.url)) as relay:
        assert DONE in opencode(relay.url, tmp_path, TASK.format("opencode"))
    assert (
        json.dumps({"reasoning_content": THOUGHT})[1:-1].replace(": ", ":").encode() in relay.sent
    )
    loses_nothing(asked(live, n))


def test_opencode_takes_our_model_in_a_project_with_another(live: Running, tmp_path: Path) -> None:
    words = started_by_us("opencode", installed(OPENCODE), live, tmp_path)
    (tmp_path / "opencode.json").write_text('{"model": "anthropic/claude-sonnet-4-5"}')
    n = len(asked(live))
    assert DONE in run([*words, "run", TASK.format("opencode")], tmp_path)
    loses_nothing(asked(live, n))


def test_pi_runs_a_tool_and_loses_nothing(live: Running, tmp_path: Path) -> None:
    program = installed(PI)
    n = len(asked(live))
    args = started_by_us("pi", program, live, tmp_path)
    assert DONE in run([*args, "-p", TASK.format("pi")], tmp_path)
    loses_nothing(asked(live, n))


def test_qwen_code_runs_a_tool_and_loses_nothing(live: Running, tmp_path: Path) -> None:
    program = installed(QWEN)
    n = len(asked(live))
    args = started_by_us("qwen", program, live, tmp_path)
    assert DONE in run([*args, "--yolo", "-p", TASK.format("qwen")], tmp_path)
    loses_nothing(asked(live, n))
