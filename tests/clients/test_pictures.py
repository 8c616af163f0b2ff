"""Images as real clients send them: seen, computed once, and left out by a text model."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("PIL")

from tests.api.running import Running
from tests.clients.agents import (
    CLAUDE,
    CODEX,
    CODEX_CONFIG,
    N_CTX,
    OPENCODE,
    installed,
    opencode_config,
)  # fmt: skip
from tests.clients.pictures import AND_NOW, picture_tapes, png
from tests.clients.scripted import call
from tests.clients.stage import playing, run
from tests.clients.tapes import Request, Tape
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

SEEN, LEFT_OUT, NOTHING_NEW = "I see it.", "It was left out.", "Nothing new."
SCRIPT = [
    {"when": "task for claude", "say": call("Read", file_path="picture.png")},
    {"when": "task for codex", "say": call("view_image", path="picture.png")},
    {"when": r"\[IMG\]", "say": SEEN},
    {"when": "image omitted", "say": LEFT_OUT},
    {"when": re.escape(AND_NOW), "say": NOTHING_NEW},
    {"when": ".", "say": "A short title"},
]
TEXT = re.compile(r'"(?:text|delta|content)":("(?:[^"\\]|\\.)*")')
COLORS = ("red", "green", "blue", "yellow")
TAPES = [picture_tapes(png(color))[i] for i, color in enumerate(COLORS)]
"""Each with a picture of its own."""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with playing(tmp_path_factory.mktemp("seeing"), SCRIPT, N_CTX, sees=True) as found:
        yield found


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with playing(tmp_path_factory.mktemp("blind"), SCRIPT, N_CTX) as found:
        yield found


def sent(live: Running, request: Request) -> httpx.Response:
    return httpx.post(
        live.url + request.path, json=request.body, headers=request.headers, timeout=PATIENCE_S
    )


def answer(reply: httpx.Response) -> str:
    """The text of a stream in any dialect."""
    return "".join(json.loads(text) for text in TEXT.findall(reply.text))


def n_encodes(live: Running) -> int:
    value = httpx.get(live.url + "/metrics", timeout=PATIENCE_S).text
    found = re.search(r"^mlxstack_image_encodes_total (\d+)", value, re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("tape", TAPES, ids=lambda tape: str(tape.name))
def test_an_image_is_seen_and_computed_once(seeing: Running, tape: Tape) -> None:
    *_, first, later = tape.requests
    before = n_encodes(seeing)
    reply = sent(seeing, first)
    assert reply.status_code == 200
    assert SEEN in answer(reply)
    assert reply.headers["x-mlx-stack-images"] == "1, computed 1"
    reply = sent(seeing, later)
    assert NOTHING_NEW in answer(reply)
    assert reply.headers["x-mlx-stack-images"] == "1, computed 0"
    assert n_encodes(seeing) == before + 1
    found = [one for one in seeing.service.request_log.requests() if one.n_images]
    assert [(one.n_images, one.n_images_computed) for one in found[:2]] == [(1, 0), (1, 1)]


@pytest.mark.parametrize("tape", TAPES, ids=lambda tape: str(tape.name))
def test_a_text_model_leaves_images_of_tools_and_histories_out(blind: Running, tape: Tape) -> None:
    *_, first, later = tape.requests
    reply = sent(blind, first)
    if "attached" in tape.name:
        assert reply.status_code == 400
        assert reply.json()["error"]["param"].endswith("content")
        assert "not supported by this model; send text" in reply.json()["error"]["message"]
    else:
        assert LEFT_OUT in answer(reply)
    assert NOTHING_NEW in answer(sent(blind, later))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "picture.png").write_bytes(png("purple"))
    return tmp_path


def codex(url: str, home: Path, *args: str) -> str:
    (home / "config.toml").write_text(CODEX_CONFIG.format(url=url))
    command = [installed(CODEX), "exec", "--json", "--skip-git-repo-check"]
    command += ["--dangerously-bypass-approvals-and-sandbox", *args]
    return run(command, home, CODEX_HOME=str(home), LOCAL_KEY="x")


@pytest.mark.slow
def test_claude_code_reads_a_picture(seeing: Running, home: Path) -> None:
    command = [installed(CLAUDE), "-p", "this is the task for claude", "--output-format", "json"]
    told = run(
        [*command, "--allowedTools", "Read"],
        home,
        ANTHROPIC_BASE_URL=seeing.url,
        ANTHROPIC_AUTH_TOKEN="x",
        ANTHROPIC_MODEL="local-model",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="local-model",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_CONTEXT_TOKENS=str(N_CTX),
    )
    assert json.loads(told.splitlines()[-1])["result"] == SEEN


@pytest.mark.slow
def test_codex_shows_an_attached_picture_and_one_that_it_views(seeing: Running, home: Path) -> None:
    assert SEEN in codex(seeing.url, home, "--image=picture.png", "what is it")
    assert SEEN in codex(seeing.url, home, "this is the task for codex")


@pytest.mark.slow
def test_opencode_shows_an_attached_picture(seeing: Running, home: Path) -> None:
    program = installed(OPENCODE)
    model = {"attachment": True, "modalities": {"input": ["text", "image"], "output": ["text"]}}
    opencode_config(seeing.url, home, model)
    args = ["run", "--model", "local/local-model", "look at this", "-f", "picture.png"]
    assert SEEN in run([program, *args], home)
