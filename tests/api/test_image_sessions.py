"""Sessions with screenshots over HTTP: encoded once, and a clear answer to odd pictures."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from mlxstack.core.preset import ServerSpec, SlotSpec
from tests import vision_models
from tests.api.running import Running, running, tiny_preset
from tests.api.test_served_images import answer, asked, counts, said
from tests.api.test_swap import swap
from tests.patience import PATIENCE_S
from tests.text.test_image_bounds import bomb, encoded

pytestmark = [pytest.mark.mlx, pytest.mark.net]

N_SCREENSHOTS = 15
N_TURNS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_models.build(tmp_path_factory.mktemp("models") / "vl", "qwen3_5")


@pytest.fixture(scope="module")
def service(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("home")
    (home / "presets").mkdir()
    other = vision_models.build(tmp_path_factory.mktemp("models") / "other", "qwen3_5", seed=9)
    for name, model in (("own", folder), ("other", other)):
        text = f"model: {{id: {model}, alias: tiny}}\nslots: {{count: 3, n_ctx: 4096}}\n"
        (home / "presets" / f"{name}.yaml").write_text(text)
    slots = SlotSpec(count=3, n_ctx=4096)
    with running(tiny_preset(folder, server=ServerSpec(port=0), slots=slots), home) as found:
        yield found


@pytest.fixture
def client(service: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=PATIENCE_S) as client:
        yield client


def test_later_turns_of_a_session_with_15_screenshots_compute_none(client: httpx.Client) -> None:
    seeds = range(100, 100 + N_SCREENSHOTS)
    messages = [asked(*seeds)]
    n_encodes = counts(client)[0]
    for turn in range(1, N_TURNS + 1):
        before = counts(client)
        reply = answer(client, *messages, max_tokens=4)
        if turn == 1:
            assert counts(client)[0] == n_encodes + N_SCREENSHOTS
        else:
            assert counts(client) == before, turn
        if turn in (2, N_TURNS):
            cold = answer(client, *messages, max_tokens=4, cache_prompt=False)
            assert said(cold) == said(reply), turn
        details = reply["usage"]["prompt_tokens_details"]
        assert details["image_tokens"] == N_SCREENSHOTS * 6
        messages += [said(reply), {"role": "user", "content": f"And now {turn}?"}]


def test_images_are_found_again_after_a_swap_there_and_back(client: httpx.Client) -> None:
    message = asked(40)
    message["content"].append({"type": "text", "text": "Look at it again. " * 60})
    first = said(answer(client, message))
    swap(client, "other")
    foreign = said(answer(client, message))
    assert foreign == said(answer(client, message, cache_prompt=False))
    swap(client, "own")
    before = counts(client)
    assert said(answer(client, message)) == first
    assert counts(client) == before


def gif() -> bytes:
    frames = [Image.new("RGB", (80, 80), (n, 0, 90)) for n in range(200)]
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    return out.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(Image.new("RGB", (128, 64), "red"), "JPEG", exif=exif)


NOISE = Image.effect_noise((64, 64), 90)
PALETTE = Image.new("P", (64, 64), 0)
PALETTE.putpalette([255, 0, 0, 0, 0, 255])

TAKEN = {
    "animated GIF": gif(),
    "EXIF orientation": turned(),
    "palette with alpha": encoded(PALETTE, transparency=0),
    "16 bit": encoded(Image.new("I;16", (64, 64), 32_768)),
    "CMYK": encoded(Image.new("CMYK", (64, 64), (0, 99, 0, 0)), "JPEG"),
    "WebP": encoded(NOISE.convert("RGB"), "WEBP"),
    "one pixel": encoded(Image.new("L", (1, 1))),
    "a line": encoded(Image.new("L", (4000, 1))),
}
REFUSED = {
    "bomb": (bomb(50_000, 50_000), "pixels"),
    "20 MB": (b"\x89PNG\r\n\x1a\n" + bytes(20_000_000), "at most 8388608"),
    "truncated": (encoded(NOISE)[:-600], "broken"),
    "SVG named .png": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "send PNG"),
    "empty": (b"", "send PNG"),
}


def shown(data: bytes) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


@pytest.mark.parametrize("name", TAKEN)
def test_odd_pictures_are_taken(client: httpx.Client, name: str) -> None:
    first = said(answer(client, shown(TAKEN[name])))
    assert said(answer(client, shown(TAKEN[name]), cache_prompt=False)) == first


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_picture_is_a_400_with_its_measure_and_poisons_no_session(
    client: httpx.Client, name: str
) -> None:
    data, says = REFUSED[name]
    message = shown(data)
    refused = client.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 4})
    assert refused.status_code == 400
    assert says in refused.json()["error"]["message"]
    assert "messages[0].content[0]" in refused.text
    use = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    source = {"type": "base64", "media_type": "image/png"}
    picture = {"type": "image", "source": {**source, "data": base64.b64encode(data).decode()}}
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [use]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [picture]}],
        },
    ]
    body = {"messages": turns, "max_tokens": 4, "model": "tiny"}
    client.post("/v1/messages", json=body).raise_for_status()
    history = [message, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Go"}]
    answer(client, *history)
    # A client may keep the refused message, and ask again without an answer between.
    answer(client, message, {"role": "user", "content": "Go on"})
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    items = [
        {"role": "user", "content": [{"type": "input_image", "image_url": url}]},
        {"role": "user", "content": "Go on"},
    ]
    body = {"input": items, "max_output_tokens": 16, "model": "tiny"}
    client.post("/v1/responses", json=body).raise_for_status()
    turns = [{"role": "user", "content": [picture]}, {"role": "user", "content": "Go on"}]
    body = {"messages": turns, "max_tokens": 4, "model": "tiny"}
    client.post("/v1/messages", json=body).raise_for_status()
