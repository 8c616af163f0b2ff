"""Images as real clients send them: seen, computed once, and left out by a text model."""

import json
import re
from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip("PIL")

from tests.api.running import Running
from tests.clients.agents import N_CTX
from tests.clients.pictures import AND_NOW, picture_tapes, png
from tests.clients.stage import playing
from tests.clients.tapes import Request, Tape
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

SEEN = "I see it."
LEFT_OUT = "It was left out."
NOTHING_NEW = "Nothing new."
SCRIPT = [
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
    with playing(tmp_path_factory.mktemp("seeing"), SCRIPT, N_CTX, sees=True) as stage:
        yield stage


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with playing(tmp_path_factory.mktemp("blind"), SCRIPT, N_CTX) as stage:
        yield stage


def sent(live: Running, request: Request) -> httpx.Response:
    return httpx.post(
        live.url + request.path, json=request.body, headers=request.headers, timeout=PATIENCE_S
    )


def answer(reply: httpx.Response) -> str:
    """The text of a stream in any dialect."""
    return "".join(json.loads(text) for text in TEXT.findall(reply.text))


def n_encodes(live: Running) -> int:
    value = httpx.get(live.url + "/metrics", timeout=PATIENCE_S).text
    match = re.search(r"^mlxstack_image_encodes_total (\d+)", value, re.MULTILINE)
    assert match is not None
    return int(match[1])


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
    entries = [entry for entry in seeing.service.request_log.requests() if entry.n_images]
    assert [(entry.n_images, entry.n_images_computed) for entry in entries[:2]] == [(1, 0), (1, 1)]


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
