"""Keys for some models only, at a single service."""

from collections.abc import Iterator

import httpx
import pytest

from mlxstack.core.preset import ApiKey, SamplingSpec, ServerSpec
from tests.api.running import Running, running, tiny_preset
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

KEYS = ("sesame", ApiKey("fits", models=("ti*",)), ApiKey("other", models=("qwen*", "x/*")))
HELLO = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("keys")
    # A request of Ollama's API names its limit in another place.
    few = SamplingSpec(max_tokens=2)
    preset = tiny_preset(folder / "model", server=ServerSpec(port=0, api_keys=KEYS), sampling=few)
    with running(preset, folder / "home") as found:
        yield found


def status(here: Running, key: str, path: str, body: dict[str, object] | None = None) -> int:
    method = "GET" if body is None else "POST"
    headers = {"authorization": f"Bearer {key}"}
    return httpx.request(
        method, here.url + path, json=body, headers=headers, timeout=PATIENCE_S
    ).status_code


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_a_key_of_other_models_generates_nothing(here: Running, path: str) -> None:
    assert status(here, "other", path, dict(HELLO)) == 403
    assert status(here, "other", path, {**HELLO, "model": "qwen"}) == 403
    assert status(here, "fits", path, dict(HELLO)) == 200
    assert status(here, "other", "/slots") == 403 and status(here, "other", "/v1/models") == 200


def test_a_key_of_some_models_does_not_change_the_model(here: Running) -> None:
    assert status(here, "fits", "/v1/models/load", {"preset": "demo"}) == 403
    assert status(here, "fits", "/metrics") == 403
    assert status(here, "sesame", "/metrics") == 200
