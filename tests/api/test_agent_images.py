"""Agents with images: stored once beside the history, bounded, whole after every change."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from mlxstack.core.preset import ServerSpec
from mlxstack.service.calls import agents
from tests import vision_models
from tests.api.running import Running, running, tiny_preset
from tests.api.test_served_images import asked, png
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

TURN = {"max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def seeing(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = vision_models.build(tmp_path_factory.mktemp("models") / "vl", "qwen3_vl")
    with running(tiny_preset(folder, server=ServerSpec(port=0)), home) as found:
        yield found


@pytest.fixture
def client(seeing: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=seeing.url, timeout=PATIENCE_S) as client:
        yield client


def next_turn(client: httpx.Client, agent: str, *messages: dict[str, Any]) -> httpx.Response:
    return client.post(f"/v1/agents/{agent}/generate", json={"append": messages, **TURN})


def history(client: httpx.Client, agent: str) -> list[dict[str, Any]]:
    answer = client.get(f"/v1/agents/{agent}/history").raise_for_status()
    messages: list[dict[str, Any]] = answer.json()["messages"]
    return messages


def images(home: Path, agent: str) -> dict[bytes, int]:
    """Stored images of an agent, with the inodes of their files."""
    files = (home / "agents" / agent / "images").glob("*")
    return {file.read_bytes(): file.stat().st_ino for file in files}


def test_a_text_turn_writes_no_image_again(client: httpx.Client, home: Path) -> None:
    next_turn(client, "ann", asked(1, 2)).raise_for_status()
    stored = images(home, "ann")
    assert stored.keys() == {base64.b64decode(png(1)), base64.b64decode(png(2))}
    next_turn(client, "ann", {"role": "user", "content": "and now?"}).raise_for_status()
    next_turn(client, "ann", asked(1)).raise_for_status()
    assert images(home, "ann") == stored
    assert png(1) not in (home / "agents" / "ann" / "history.json").read_text()
    shown = history(client, "ann")
    assert len(shown) == 6
    urls = [part["image_url"]["url"] for part in shown[0]["content"] if "image_url" in part]
    assert [url.partition(",")[2] for url in urls] == [png(1), png(2)]


def test_changes_of_an_agent_keep_its_images_whole(client: httpx.Client, home: Path) -> None:
    next_turn(client, "ben", asked(3)).raise_for_status()
    next_turn(client, "ben", asked(4)).raise_for_status()
    client.post("/v1/agents/ben/fork", json={"id": "cid"}).raise_for_status()
    assert images(home, "cid").keys() == images(home, "ben").keys()
    assert history(client, "cid") == history(client, "ben")
    client.post("/v1/agents/ben/rewind", json={"n_messages": 2}).raise_for_status()
    assert images(home, "ben").keys() == {base64.b64decode(png(3))}
    client.delete("/v1/agents/ben").raise_for_status()
    assert not (home / "agents" / "ben").exists()
    assert len(images(home, "cid")) == 2
    next_turn(client, "cid", {"role": "user", "content": "go on"}).raise_for_status()


def test_a_history_of_an_earlier_release_is_read_and_stored_anew(
    client: httpx.Client, home: Path
) -> None:
    next_turn(client, "dan", asked(5)).raise_for_status()
    file = home / "agents" / "dan" / "history.json"
    stored = msgspec.json.decode(file.read_bytes())
    earlier = {**stored, "version": 1, "messages": history(client, "dan")}
    file.write_bytes(msgspec.json.encode(earlier))
    for image in (file.parent / "images").iterdir():
        image.unlink()
    assert history(client, "dan") == earlier["messages"]
    next_turn(client, "dan", {"role": "user", "content": "and now?"}).raise_for_status()
    assert images(home, "dan").keys() == {base64.b64decode(png(5))}


def test_an_image_that_is_gone_is_told(client: httpx.Client, home: Path) -> None:
    next_turn(client, "eve", asked(6)).raise_for_status()
    for image in (home / "agents" / "eve" / "images").iterdir():
        image.unlink()
    refused = next_turn(client, "eve", {"role": "user", "content": "and now?"})
    assert refused.status_code == 409
    assert "send its full `messages` once" in refused.text
    healed = client.post("/v1/agents/eve/generate", json={"messages": [asked(6)], **TURN})
    assert healed.status_code == 200


BODIES = {
    "/v1/agents/fay/generate": {"append": [asked(8)], **TURN},
    "/v1/chat/completions": {"messages": [asked(7), asked(8)], "agent": "fay", **TURN},
    "/v1/messages": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/png", "data": png(n)},
                    }
                    for n in (7, 8)
                ],
            }
        ],
        "agent": "fay",
        "max_tokens": 2,
    },
    "/v1/responses": {
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": f"data:image/png;base64,{png(n)}"}
                    for n in (7, 8)
                ],
            }
        ],
        "agent": "fay",
        "max_output_tokens": 2,
    },
    "/v1/agents": {"id": "gus", "messages": [asked(7), asked(8)]},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("bound", ["MAX_HISTORY_BYTES", "MAX_IMAGES"])
def test_a_history_is_bounded_in_every_dialect(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, bound: str
) -> None:
    client.delete("/v1/agents/fay")
    next_turn(client, "fay", asked(7)).raise_for_status()
    before = history(client, "fay")
    least = {"MAX_HISTORY_BYTES": len(base64.b64decode(png(7))) + 100, "MAX_IMAGES": 1}
    monkeypatch.setattr(agents, bound, least[bound])
    refused = client.post(path, json=BODIES[path])
    assert refused.status_code == 400
    assert "are kept: rewind it" in refused.text
    assert history(client, "fay") == before
    next_turn(client, "fay", {"role": "user", "content": "and now?"}).raise_for_status()
