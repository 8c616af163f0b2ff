"""The real Codex against a scripted model: namespaces, cut streams, images and full contexts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.running import Running
from tests.clients.agents import (
    CODEX_EXEC,
    DONE,
    N_CTX,
    SCRIPT,
    SEEN,
    TASK,
    Start,
    asked,
    codex,
    command,
    environment,
    generations,
    installed,
    loses_nothing,
    observed,
    project,
)
from tests.clients.pictures import png
from tests.clients.relay import Relay, relaying
from tests.clients.stage import ended, playing

pytest.importorskip("PIL")
pytestmark = [pytest.mark.client, pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    installed("codex")
    with playing(tmp_path_factory.mktemp("codex"), SCRIPT, N_CTX, sees=True) as service:
        yield service


def test_codex_dispatches_a_tool_of_a_namespace(live: Running, tmp_path: Path) -> None:
    with observed(live) as relay:
        assert DONE in codex(relay.url, tmp_path, TASK.format("a name"))
    _, result = generations(relay.exchanges)
    assert b'"namespace":"multi_agent_v1"' in result.body
    assert b"invalid agent id nobody" in result.body, "it was dispatched, and failed on its own"


def test_codex_comes_back_after_a_cut_stream(live: Running, tmp_path: Path) -> None:
    n = len(asked(live))
    with relaying(Relay(live.url, to=b"POST /v1/responses", after=1500, cuts=1)) as relay:
        assert DONE in codex(relay.url, tmp_path, TASK.format("codex"))
    assert relay.n_cut == 1
    cut, again, last = asked(live, n)
    assert again.n_prompt == cut.n_prompt, "the cut one was sent again"
    assert again.n_cached > cut.n_cached, "what had been computed of it was kept"
    loses_nothing([again, last])


def test_codex_sees_a_picture_that_it_views(live: Running, tmp_path: Path) -> None:
    (project(tmp_path) / "picture.png").write_bytes(png("purple"))
    with observed(live) as relay:
        assert SEEN in codex(relay.url, tmp_path, "look with codex")


def test_a_full_context_is_final(tmp_path: Path) -> None:
    with playing(tmp_path / "small", SCRIPT, n_ctx=4096) as small:
        argv, variables = command("codex", small.url, tmp_path, Start.BY_HAND)
        argv += [*CODEX_EXEC, TASK.format("codex")]
        done = ended(argv, project(tmp_path), **environment(tmp_path, **variables))
        assert asked(small) == []
    assert "turn.failed" in done.stdout
    assert "ran out of room" in done.stdout


def test_codex_drops_none_of_our_settings(live: Running, tmp_path: Path) -> None:
    argv, variables = command("codex", live.url, tmp_path, Start.RUN)
    task = [*argv, *CODEX_EXEC, TASK.format("codex")]
    done = ended(task, project(tmp_path), **environment(tmp_path, **variables))
    assert DONE in done.stdout, done.stderr
    assert "unrecognized configuration" not in done.stderr
