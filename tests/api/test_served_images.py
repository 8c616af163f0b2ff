"""Images over HTTP: encoded and prefilled once, in every dialect, never another image's answer."""

import base64
import re
from collections.abc import Iterator
from io import BytesIO
from random import Random
from typing import Any

import httpx
import pytest
from PIL import Image

from mlxstack.core.image import FIRST_VIRTUAL
from mlxstack.core.preset import ServerSpec
from tests import vision_models
from tests.api.running import Running, running, tiny_preset
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]


def png(seed: int) -> str:
    """Base64 of a picture of four random colors."""
    blocks = Image.frombytes("RGB", (2, 2), Random(seed).randbytes(12))
    out = BytesIO()
    blocks.resize((96, 64), Image.Resampling.NEAREST).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_vl", "mistral3", "gemma3", "gemma4"])
def seeing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    folder = vision_models.build(tmp_path_factory.mktemp("models") / "vl", request.param)
    preset = tiny_preset(folder, server=ServerSpec(port=0))
    with running(preset, tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture
def client(seeing: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=seeing.url, timeout=PATIENCE_S) as client:
        for slot in range(3):
            client.post(f"/slots/{slot}?action=erase").raise_for_status()
        yield client


def counts(client: httpx.Client) -> tuple[int, int]:
    """Images encoded, and their tokens prefilled."""
    text = client.get("/metrics").text
    names = ("image_encodes", "image_tokens_prefilled")
    found = [re.search(rf"^mlxstack_{name}_total (\S+)$", text, re.MULTILINE) for name in names]
    encodes, tokens = (int(float(one[1])) for one in found if one is not None)
    return encodes, tokens


def asked(*seeds: int) -> dict[str, Any]:
    """A user message with pictures, in the form of OpenAI's chat."""
    shown = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(seed)}"}}
        for seed in seeds
    ]
    return {"role": "user", "content": [*shown, {"type": "text", "text": "What is it?"}]}


def answer(client: httpx.Client, *messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **more}
    return dict(client.post("/v1/chat/completions", json=body).raise_for_status().json())


def said(reply: dict[str, Any]) -> dict[str, Any]:
    return dict(reply["choices"][0]["message"])


def test_a_second_turn_encodes_and_prefills_no_image(client: httpx.Client) -> None:
    first = said(answer(client, asked(1, 2)))
    before = counts(client)
    messages = [asked(1, 2), first, {"role": "user", "content": "And now?"}]
    hit = answer(client, *messages)
    assert counts(client) == before
    assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    cold = answer(client, *messages, cache_prompt=False)
    assert said(hit) == said(cold)


def test_another_image_is_another_prompt(client: httpx.Client) -> None:
    answer(client, asked(1))
    other = answer(client, asked(3))
    cold = answer(client, asked(3), cache_prompt=False)
    assert said(other) == said(cold)
    n_cached = other["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert n_cached < other["usage"]["prompt_tokens"] - 6


def test_an_image_beside_text_rows_changes_no_token(client: httpx.Client) -> None:
    text = {"role": "user", "content": "Hello there"}
    colds = [said(answer(client, one, cache_prompt=False)) for one in (asked(4), text)]
    replies = [said(answer(client, one, n=2)) for one in (asked(4), text)]
    assert replies == colds


def test_anthropic_sends_the_same_image(client: httpx.Client) -> None:
    answer(client, asked(5))
    before = counts(client)[0]
    source = {"type": "base64", "media_type": "image/png", "data": png(5)}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "model": "tiny"}
    reply = client.post("/v1/messages", json=body).raise_for_status().json()
    assert reply["usage"]["output_tokens"] > 0
    assert counts(client)[0] == before


def test_a_broken_image_is_refused_when_new_and_omitted_in_history(client: httpx.Client) -> None:
    broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    message = {"role": "user", "content": [broken, {"type": "text", "text": "See?"}]}
    body = {"messages": [message], "max_tokens": 4}
    refused = client.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    history = [message, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Ok"}]
    assert said(answer(client, *history))["content"] is not None


def test_a_model_that_sees_says_so(client: httpx.Client) -> None:
    model = client.get("/v1/models").json()["data"][0]
    assert model["input_modalities"] == ["text", "image"]
    assert client.get("/props").json()["modalities"]["vision"] is True

    card = client.post("/api/show", json={"model": "tiny"}).raise_for_status().json()
    assert "vision" in card["capabilities"]


def test_usage_and_a_header_count_images(client: httpx.Client) -> None:
    body = {"messages": [asked(7, 8)], "max_tokens": 4, "temperature": 0}
    # Two rows of three features; for Mistral 3 three of four, each with its end.
    by_placeholder = {"[IMG]": 15, "<image_soft_token>": 16, "<|image|>": 24}
    n_tokens = by_placeholder.get(placeholder(client), 6)
    whole = client.post("/v1/chat/completions", json=body).raise_for_status()
    assert whole.headers["x-mlx-stack-images"] == "2, computed 2"
    assert whole.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 2 * n_tokens
    with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as again:
        assert again.headers["x-mlx-stack-images"] == "2, computed 0"
        again.read()
    items = [{"type": "input_image", "image_url": f"data:image/png;base64,{png(7)}"}]
    asks = [{"role": "user", "content": [*items, {"type": "input_text", "text": "What is it?"}]}]
    reply = client.post("/v1/responses", json={"input": asks, "max_output_tokens": 4})
    details = reply.raise_for_status().json()["usage"]["input_tokens_details"]
    assert details["image_tokens"] == n_tokens
    text = client.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    ).raise_for_status()
    assert "x-mlx-stack-images" not in text.headers
    assert "image_tokens" not in text.json()["usage"]["prompt_tokens_details"]


def test_slots_with_images_are_saved_and_restored(client: httpx.Client) -> None:
    wanted = said(answer(client, asked(6), id_slot=1))
    before = counts(client)
    for action in ("save", "erase", "restore"):
        path = f"/slots/1?action={action}"
        body = {"filename": "image.bin"}
        client.post(path, json=body).raise_for_status()
    again = answer(client, asked(6), id_slot=1)
    assert said(again) == wanted and counts(client) == before


def completed(client: httpx.Client, prompt: Any, **more: Any) -> httpx.Response:
    body = {"prompt": prompt, "n_predict": 8, "temperature": 0, "ignore_eos": True, **more}
    return client.post("/completion", json=body)


def placeholder(client: httpx.Client) -> str:
    """Text of a virtual id."""
    reply = client.post("/detokenize", json={"tokens": [FIRST_VIRTUAL + 5]})
    return str(reply.raise_for_status().json()["content"])


def test_a_completion_takes_images_at_media_markers(client: httpx.Client) -> None:
    texts = "see <__media__> and <__media__> now"
    prompt = {"prompt_string": texts, "multimodal_data": [png(20), png(21)]}
    first = completed(client, prompt).raise_for_status().json()
    before = counts(client)
    again = completed(client, prompt).raise_for_status().json()
    assert (again["content"], counts(client)) == (first["content"], before)
    assert again["prompt"] == texts
    cold = completed(client, prompt, cache_prompt=False).raise_for_status().json()
    assert cold["content"] == first["content"]
    other = {"prompt_string": texts, "multimodal_data": [png(22), png(21)]}
    ids = completed(client, other, return_tokens=True).raise_for_status().json()
    assert ids["tokens_evaluated"] == first["tokens_evaluated"]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({"prompt_string": "none", "multimodal_data": [png(20)]}, "0 markers"),
        ({"prompt_string": "<__media__>", "multimodal_data": ["AAAA"]}, "multimodal_data[0]"),
        ({"prompt_string": "<__media__> {placeholder}", "multimodal_data": [png(20)]}, "shows 2"),
    ],
)
def test_media_that_cannot_be_placed_is_refused(
    client: httpx.Client, prompt: dict[str, Any], says: str
) -> None:
    text = prompt["prompt_string"].replace("{placeholder}", placeholder(client))
    refused = completed(client, {**prompt, "prompt_string": text})
    assert refused.status_code == 400
    assert says in refused.text


def test_virtual_ids_are_detokenized_as_the_placeholder(client: httpx.Client) -> None:
    assert placeholder(client) in ("<|image_pad|>", "[IMG]", "<image_soft_token>", "<|image|>")
    body = {"tokens": [FIRST_VIRTUAL + 5]}
    refused = client.post("/completion", json={"prompt": body["tokens"], "n_predict": 1})
    assert refused.status_code == 400
