"""Receipts: what they say of a turn, and where clients show them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.cells import cell_len

from mlxstack.core.engine_events import KVSource
from mlxstack.core.status import MissView, RequestView
from mlxstack.features.receipts import receipt_line
from mlxstack.features.receipts.client_hooks import (
    EXTENSION_NAME,
    KEPT,
    PLUGIN,
    UserPlace,
    status_line_of,
    with_receipt,
)
from mlxstack.features.receipts.mode import ReceiptMode
from mlxstack.features.receipts.policy import Cause, cause_of, main_turn, receipt_of, waited_s
from mlxstack.features.receipts.receipt_line import (
    KEY_VARIABLE,
    MODEL_VARIABLE,
    URL_VARIABLE,
    WRAP,
    quick_line,
)
from mlxstack.host.coding_clients import CLIENTS, ClientSetup, Endpoint
from tests.cli.terminal import Shell
from tests.ports import unused_port

TURN = RequestView(
    "r", "a", n_prompt=31_412, n_cached=31_000, n_generated=8, ttft_s=0.8, first_s=0.8, ended="eos"
)
LOST = MissView("diverged", at=400, text_cached="Friday", text_sent="Saturday", n_lost=30_000)
SERVICE = Endpoint("http://127.0.0.1:7109", "tiny", 32_768)
WIDE = 110

seconds = st.floats(0, 1e5)
texts = st.text(max_size=60)
counts = st.integers(0, 10**6)
misses = st.none() | st.builds(
    MissView,
    reason=st.sampled_from(("cold", "new conversation", "diverged", "evicted", "no checkpoint")),
    at=st.none() | counts,
    text_cached=texts,
    text_sent=texts,
    n_lost=st.sampled_from((0, 1, 30_000)),
)
views = st.builds(
    RequestView,
    id=st.just("r"),
    source=st.sampled_from(KVSource),
    n_prompt=counts,
    n_generated=counts,
    queued_s=seconds,
    others_s=seconds,
    beside_s=seconds,
    prefill_s=seconds,
    restore_s=seconds,
    first_s=seconds,
    decode_s=seconds,
    ttft_s=seconds,
    ended=texts,
    miss=misses,
)


@given(views, st.integers(1, 250))
def test_a_receipt_is_one_line_of_its_width(view: RequestView, width: int) -> None:
    line = receipt_of(view, width).line
    assert cell_len(line) <= width
    assert line.isprintable()


@given(views)
def test_a_receipt_names_the_cause_and_the_reason(view: RequestView) -> None:
    receipt = receipt_of(view, WIDE)
    phrases = {Cause.OTHERS: "waited ", Cause.ANSWER: " tokens in ", Cause.RESTORE: "KV "}
    assert phrases.get(cause_of(view), "") in receipt.line
    assert receipt.reason == (view.miss.reason if view.miss else None)
    if view.miss is not None and view.miss.n_lost:
        assert view.miss.reason in receipt.line


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "31.0k reused, 412 new, first token 800ms, waited 0ms for others"),
        (
            {"queued_s": 4.0, "beside_s": 2.0, "ttft_s": 7.0},
            "31.0k reused, 412 new, first token 7.00s, waited 6.00s for others",
        ),
        (
            {"decode_s": 20.0},
            "31.0k reused, 412 new, first token 800ms, 8 tokens in 20.0s, waited 0ms for others",
        ),
        (
            {"n_cached": 400, "prefill_s": 94.0, "ttft_s": 94.0, "miss": LOST},
            "400 reused, 31.0k new, first token 1m34s: diverged, `Friday` -> `Saturday`",
        ),
        (
            {"n_cached": 0, "prefill_s": 94.0, "ttft_s": 94.0, "miss": MissView("cold")},
            "0 reused, 31.4k new, first token 1m34s: cold",
        ),
        ({"ttft_s": 0.0, "ended": "cancelled"}, "31.0k reused, 412 new, no token (cancelled)"),
    ],
)
def test_what_a_receipt_says(changes: dict[str, Any], line: str) -> None:
    assert receipt_of(replace(TURN, **changes), WIDE).line.startswith(line)


def test_a_narrow_receipt_drops_what_is_no_cause() -> None:
    slow = replace(TURN, decode_s=20.0)
    assert receipt_of(slow, 70).line.endswith("8 tokens in 20.0s")
    assert waited_s(slow) == 0


def test_a_title_is_no_turn_of_a_session() -> None:
    title = replace(TURN, id="title", n_prompt=900)
    after_compaction = replace(TURN, id="short", n_prompt=5_000)
    assert main_turn([title, TURN]) == TURN
    assert main_turn([title, after_compaction, TURN]) == after_compaction
    assert main_turn([]) is None


def setup_of(client: str, folder: Path, mode: ReceiptMode = ReceiptMode.AUTO) -> ClientSetup:
    place = UserPlace(folder / "home", folder / "project")
    return with_receipt(client, CLIENTS[client](SERVICE, folder), SERVICE, mode, place)


def own_line(folder: Path, command: str, name: str = "settings.json") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    line = {"type": "command", "command": command, "padding": 1}
    (folder / name).write_text(json.dumps({"statusLine": line}))


def claude_settings(setup: ClientSetup) -> dict[str, Any]:
    (text,) = setup.files.values()
    return dict(json.loads(text))


def test_claude_code_gets_a_status_line(tmp_path: Path) -> None:
    settings = claude_settings(setup_of("claude", tmp_path))
    assert settings["statusLine"]["command"].endswith("receipt_line.py")
    assert settings["env"][URL_VARIABLE] == SERVICE.url


def test_a_users_own_status_line_is_kept_and_wrapped_on_request(tmp_path: Path) -> None:
    own_line(tmp_path / "home", "date")
    setup = setup_of("claude", tmp_path)
    assert "statusLine" not in claude_settings(setup)
    assert setup.hint and setup.hint.endswith(KEPT)
    wrapped = claude_settings(setup_of("claude", tmp_path, ReceiptMode.WRAP))["statusLine"]
    assert wrapped["command"].endswith("--wrap date")
    assert wrapped["padding"] == 1


def test_the_status_line_of_the_project_goes_first(tmp_path: Path) -> None:
    own_line(tmp_path / "home", "date")
    own_line(tmp_path / "project" / ".claude", "pwd", "settings.local.json")
    (tmp_path / "project" / ".claude" / "settings.json").write_text("[broken")
    line = status_line_of(UserPlace(tmp_path / "home", tmp_path / "project"))
    assert line is not None
    assert line["command"] == "pwd"


@pytest.mark.parametrize("client", CLIENTS)
def test_no_client_shows_receipts_that_are_off(client: str, tmp_path: Path) -> None:
    setup = CLIENTS[client](SERVICE, tmp_path)
    assert setup_of(client, tmp_path, ReceiptMode.OFF) == setup


def test_opencode_and_pi_get_a_plugin_and_an_extension(tmp_path: Path) -> None:
    opencode = json.loads(setup_of("opencode", tmp_path).variables["OPENCODE_CONFIG_CONTENT"])
    assert opencode["plugin"] == [PLUGIN.as_uri()]
    assert str(tmp_path / "extensions" / EXTENSION_NAME) in setup_of("pi", tmp_path).files


def status_line(variables: dict[str, str], session: str, *arguments: str) -> str:
    """Output of the status line, started as Claude Code starts it."""
    file = receipt_line.__file__
    done = subprocess.run(
        [sys.executable, "-I", "-S", file, *arguments],
        env=variables,
        input=session,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("session", ["", "[]", '{"session_id": "x"}'])
def test_a_status_line_without_a_service_is_empty(session: str) -> None:
    away = {URL_VARIABLE: f"http://127.0.0.1:{unused_port()}"}
    assert status_line(away, session) == status_line({}, session) == ""
    assert status_line(away, session, WRAP, "cat; echo mine") == f"{session}mine\n"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Shell]:
    """A terminal with the demo, served by its own worker."""
    shell = Shell(tmp_path)
    del shell.env["MLX_STACK_WORKER"]
    assert shell.up().returncode == 0
    yield shell
    shell.kill()


@pytest.mark.mlx
@pytest.mark.net
def test_status_line_and_why_give_the_receipt_of_a_session(served: Shell) -> None:
    url = f"http://127.0.0.1:{served.port}"
    assert served.run("why", "--url", f"http://127.0.0.1:{unused_port()}").stdout == ""
    body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    for session in ("one", "two"):
        headers = {"x-claude-code-session-id": session}
        body["messages"] = [{"role": "user", "content": f"hello from session {session}"}]
        httpx.post(f"{url}/v1/messages", json=body, headers=headers).raise_for_status()
    first = httpx.get(f"{url}/receipts/claude:one?width=76").json()
    last = httpx.get(f"{url}/receipts?width=80").json()
    assert first["request"] != last["request"]
    assert httpx.get(f"{url}/requests/{first['request']}").json()["miss"]["reason"] == "cold"
    variables = {URL_VARIABLE: url, MODEL_VARIABLE: "tiny", KEY_VARIABLE: "x", "COLUMNS": "80"}
    assert status_line(variables, '{"session_id": "one"}') == f"{first['line']}\n"
    assert served.run("why", COLUMNS="80").stdout == f"{last['line']}\n"
    home = {"MLX_STACK_HOME": str(served.home)}
    assert quick_line(["why", first["agent"]], os.environ | home).startswith(first["line"][:20])
    assert served.run("why", "nobody").returncode == 1
    assert quick_line(["why", "nobody"], os.environ | home) == ""
    assert quick_line(["why", "--json"], os.environ | home) == ""
