"""The demo model names color and letter of pictures that it was not trained on."""

import base64
import random
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import httpx
import pytest

pytest.importorskip("PIL")

from PIL import Image, ImageDraw, ImageFont

from mlxstack.core.preset import SamplingSpec
from mlxstack.demo import MODEL_DIR
from mlxstack.demo.training.pictures import COLORS, LETTERS, Picture, is_held_out
from tests.api.running import Running, running, tiny_preset
from tests.api.test_served_images import counts
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

QUESTION = "What is in this picture?"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(
        tiny_preset(MODEL_DIR, sampling=SamplingSpec(thinking=False)),
        tmp_path_factory.mktemp("home"),
    ) as live:
        yield live


@pytest.fixture
def client(service: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=PATIENCE_S) as client:
        yield client


def asked(image: Any, question: str = QUESTION) -> dict[str, Any]:
    out = BytesIO()
    image.save(out, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [part, {"type": "text", "text": question}]}


def answer(client: httpx.Client, *messages: dict[str, Any]) -> str:
    body = {"messages": messages, "max_tokens": 24, "temperature": 0}
    reply = client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


def plain(color: str, letter: str, side: int = 224) -> Picture:
    """A large letter in the middle of a white square."""
    image = Image.new("RGB", (side, side), "white")
    font = ImageFont.load_default(0.75 * side)
    middle = (side / 2, side / 2)
    ImageDraw.Draw(image).text(middle, letter, COLORS[color], font, anchor="mm")
    return Picture(image, color, letter)


def unseen() -> list[Picture]:
    """Pictures of colors and letters that training never had together."""
    rng = random.Random("unseen")
    pairs = [(color, letter) for color in COLORS for letter in LETTERS]
    return [plain(*pair, rng.randint(160, 400)) for pair in pairs if is_held_out(*pair)]


def test_unseen_pictures_are_named(client: httpx.Client) -> None:
    pictures = unseen()
    answers = [answer(client, asked(picture.image)) for picture in pictures]
    rights = [picture.answer == named for picture, named in zip(pictures, answers, strict=True)]
    assert sum(rights) >= 0.75 * len(pictures), answers
    shifted = pictures[1:] + pictures[:1]
    assert not any(picture.answer == named for picture, named in zip(shifted, answers, strict=True))


def test_the_same_letter_in_another_color_has_another_answer(client: httpx.Client) -> None:
    answers = [answer(client, asked(plain(color, "A").image)) for color in COLORS]
    assert len(set(answers)) == len(COLORS)


def test_a_second_turn_encodes_and_computes_no_picture(client: httpx.Client) -> None:
    picture = plain("green", "Z")
    first = asked(picture.image)
    reply = answer(client, first)
    before = counts(client)
    thanks = {"role": "user", "content": "Thank you!"}
    reply = answer(client, first, {"role": "assistant", "content": reply}, thanks)
    assert reply == "You are welcome!"
    assert counts(client) == before
