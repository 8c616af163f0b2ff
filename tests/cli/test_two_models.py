"""Two models by `up A B`: every command works at once, and names go to the gateway."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cli.terminal import Shell
from tests.patience import PATIENCE_S
from tests.ports import unused_port

pytestmark = [pytest.mark.mlx, pytest.mark.net]

HELLO = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}


@contextmanager
def gateway(shell: Shell) -> Iterator[Shell]:
    """A gateway of `demo` and `demo-embedding`, neither started."""
    del shell.env["MLX_STACK_WORKER"]
    up = shell.run("up", "demo", "demo-embedding", "--port", str(shell.port))
    assert up.returncode == 0, up.stderr
    assert set(shell.services()) == {"gateway"}
    try:
        yield shell
    finally:
        shell.run("down")
        shell.kill()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    with gateway(Shell(tmp_path_factory.mktemp("front"))) as found:
        yield found


@pytest.fixture
def pair(front: Shell) -> Iterator[Shell]:
    """The gateway of all tests that leave it running, without a started member."""
    assert healthy(front) == {"gateway"}
    yield front
    for name in healthy(front) - {"gateway"}:
        assert front.run("down", name).returncode == 0


@pytest.fixture
def own(shell: Shell) -> Iterator[Shell]:
    """A gateway of one test."""
    with gateway(shell) as found:
        yield found


def healthy(shell: Shell) -> set[str]:
    return {name for name, one in shell.services().items() if one["state"] == "healthy"}


def test_env_needs_no_started_member(pair: Shell) -> None:
    found = pair.run("env", "openai", "--json")
    assert found.returncode == 0, found.stderr
    variables = json.loads(found.stdout)["variables"]
    assert variables["OPENAI_BASE_URL"].startswith(f"http://127.0.0.1:{pair.port}")
    named = json.loads(pair.run("env", "openai", "--name", "demo-embedding", "--json").stdout)
    assert named["variables"]["OPENAI_MODEL"] == "demo-embedding"
    assert healthy(pair) == {"gateway"}


@pytest.mark.parametrize(
    "args",
    [
        ("chat", "-p", "Hello!"),
        ("chat", "demo", "-p", "Hello!"),
        ("run", "openai", "--", "true"),
        ("bench", "--seconds", "1"),
        ("slots",),
        ("cache",),
    ],
    ids=" ".join,
)
def test_the_first_command_starts_the_member_and_says_so(
    pair: Shell, args: tuple[str, ...]
) -> None:
    done = pair.run(*args)
    assert done.returncode == 0, done.stderr
    assert "starting demo ..." in done.stderr
    assert healthy(pair) == {"gateway", "demo"}
    again = pair.run(*args)
    assert again.returncode == 0 and "starting" not in again.stderr


def test_chat_with_a_member_starts_no_service_of_its_own(own: Shell) -> None:
    for _ in range(2):
        done = own.run("chat", "demo", "-p", "Hello!")
        assert done.returncode == 0, done.stderr
        assert "is not running" not in done.stderr
    cards = httpx.get(f"http://127.0.0.1:{own.port}/v1/models").json()["data"]
    states = {card["id"]: card["status"]["value"] for card in cards}
    assert states["demo"] == "loaded", "the gateway's own member has answered"
    done = own.run("down")
    assert done.stdout.splitlines() == ["gateway is stopped", "demo is stopped"]


def test_a_name_that_is_taken_is_a_503_with_the_reason_at_once(pair: Shell) -> None:
    alone = pair.run("up", "demo", "--port", str(unused_port()))
    assert alone.returncode == 0, alone.stderr
    url = f"http://127.0.0.1:{pair.port}/v1/chat/completions"
    refused = httpx.post(url, json=HELLO | {"model": "demo"}, timeout=PATIENCE_S)
    assert refused.status_code == 503 and refused.headers["retry-after"]
    message = refused.json()["error"]["message"]
    assert "`demo` runs at http://" in message and "`mlx-stack down demo`" in message
    assert pair.run("down", "demo").stdout == "demo is stopped\n"
    assert httpx.post(url, json=HELLO | {"model": "demo"}, timeout=PATIENCE_S).status_code == 200


def test_down_of_a_gateway_leaves_a_service_that_has_taken_a_name(own: Shell) -> None:
    assert own.run("up", "demo", "--port", str(unused_port())).returncode == 0
    assert own.run("down", "gateway").stdout == "gateway is stopped\n"
    assert own.services()["demo"]["state"] == "healthy"


def test_a_gateway_refuses_to_load_other_models(pair: Shell, tmp_path: Path) -> None:
    refused = pair.run("swap", "gpt-oss-20b")
    assert refused.returncode != 0 and "start it again with other members" in refused.stderr
