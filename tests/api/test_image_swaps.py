"""A service that changes between vision models of several families finds each one's images."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from mlxstack.core.preset import ServerSpec, SlotSpec
from tests import vision_models
from tests.api.running import running, tiny_preset
from tests.api.test_served_images import answer, asked, counts, said
from tests.api.test_swap import swap
from tests.patience import PATIENCE_S
from tests.repetition import in_soak

pytestmark = [pytest.mark.mlx, pytest.mark.net]

KINDS = ["gemma4", "mistral3"]


@pytest.fixture(params=[KINDS, *in_soak([*vision_models.CONFIGS])])
def kinds(request: pytest.FixtureRequest) -> list[str]:
    return list(request.param)


@pytest.fixture
def client(tmp_path: Path, kinds: list[str]) -> Iterator[httpx.Client]:
    (tmp_path / "home" / "presets").mkdir(parents=True)
    folders = {kind: vision_models.build(tmp_path / kind, kind) for kind in kinds}
    for kind, folder in folders.items():
        text = f"model: {{id: {folder}, alias: tiny}}\nslots: {{count: 3, n_ctx: 4096}}\n"
        (tmp_path / "home" / "presets" / f"{kind}.yaml").write_text(text)
    slots = SlotSpec(count=3, n_ctx=4096)
    preset = tiny_preset(folders[kinds[0]], server=ServerSpec(port=0), slots=slots)
    with (
        running(preset, tmp_path / "home") as service,
        httpx.Client(base_url=service.url, timeout=PATIENCE_S) as client,
    ):
        yield client


def test_each_family_finds_its_images_again_after_the_others(
    client: httpx.Client, kinds: list[str]
) -> None:
    message = asked(40)
    message["content"].append({"type": "text", "text": "Look at it again. " * 60})
    first = {}
    for kind in kinds:
        swap(client, kind)
        first[kind] = said(answer(client, message))
        assert first[kind] == said(answer(client, message, cache_prompt=False))
    for kind in kinds:
        swap(client, kind)
        before = counts(client)
        assert said(answer(client, message)) == first[kind]
        assert counts(client) == before
