"""LM Studio's lists of models, of a service and of a gateway over several."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlxstack.api.dialects.lm_studio.response_schema import quantization
from mlxstack.core.preset import ModelSpec, Preset, ServerSpec, ServiceKind, SlotSpec
from tests.api.running import Running
from tests.gateway.gateway_thread import WAYS, running_behind
from tests.gateway.real_members import Site, serving, write_presets
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

LLM = {
    "type", "publisher", "key", "display_name", "architecture", "quantization", "size_bytes",
    "params_string", "loaded_instances", "max_context_length", "format", "capabilities",
    "description",
}  # fmt: skip
EMBEDDING = LLM - {"architecture", "capabilities", "description"}


@pytest.fixture(scope="module", params=WAYS)
def demo(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    slots = SlotSpec(count=3, n_ctx=1024)
    server = ServerSpec(port=0, api_keys=("k",))
    preset = Preset(model=ModelSpec(id="demo"), slots=slots, server=server)
    with running_behind(request.param, preset, tmp_path_factory.mktemp("demo")) as found:
        yield found


def models(url: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{url}/api/v1/models")
    assert answer.status_code == 200
    assert answer.json().keys() == {"models"}
    return list(answer.json()["models"])


def test_a_loaded_model_has_the_context_of_a_slot(demo: Running) -> None:
    (model,) = models(demo.url)
    assert model.keys() == LLM
    assert (model["type"], model["key"], model["format"]) == ("llm", "demo", "mlx")
    (instance,) = model["loaded_instances"]
    config = {"context_length": 1024, "parallel": 3}
    assert instance == {"id": "demo", "config": config}
    assert model["max_context_length"] >= 1024
    assert model["size_bytes"] > 0 and model["params_string"]
    assert model["quantization"]["bits_per_weight"] in (4, 8, 16, 32)
    assert model["capabilities"] == {"vision": True, "trained_for_tool_use": True}
    known = httpx.get(f"{demo.url}/api/v0/models").json()["data"][0]
    assert known["max_context_length"] == model["max_context_length"]


def test_what_else_version_1_has_is_refused_with_what_is_served(demo: Running) -> None:
    for method, path in (
        ("POST", "/api/v1/chat"), ("POST", "/api/v1/models/load"), ("GET", "/api/v1/models/demo"),
        ("POST", "/api/v1/models/unload"), ("POST", "/api/v1/models/download"),
        ("GET", "/api/v1/models/download/status/1"),
    ):  # fmt: skip
        headers = {"authorization": "Bearer k"}
        answer = httpx.request(method, demo.url + path, headers=headers)
        assert answer.status_code == 404, path
        error = answer.json()["error"]
        assert "/api/v1/models" in error["message"] and "/v1/chat/completions" in error["message"]
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("way", WAYS)
def test_a_model_for_embeddings(way: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    preset = Preset(
        model=ModelSpec(id="demo", alias="vectors"),
        name="vectors",
        kind=ServiceKind.EMBEDDING,
        slots=SlotSpec(count=1, n_ctx=512),
        server=ServerSpec(port=0),
    )
    with running_behind(way, preset, tmp_path_factory.mktemp("vectors")) as found:
        (model,) = models(found.url)
    assert model.keys() == EMBEDDING
    assert (model["type"], model["key"]) == ("embedding", "vectors")
    assert model["loaded_instances"][0]["config"]["context_length"] == 512


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with serving(folder, write_presets(folder, {"port": 0})) as found:
        yield found


def test_members_that_do_not_run_are_listed_without_instances(site: Site) -> None:
    before = {model["key"]: model for model in models(site.url)}
    assert {name: model["type"] for name, model in before.items()} == {
        "demo": "llm", "tiny": "llm", "demo-embedding": "embedding",
    }  # fmt: skip
    for model in before.values():
        assert model.keys() == (LLM if model["type"] == "llm" else EMBEDDING)
        assert model["loaded_instances"] == []
        assert model["max_context_length"] > 0 and model["size_bytes"] > 0
    body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    httpx.post(f"{site.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).raise_for_status()
    after = {model["key"]: model for model in models(site.url)}
    assert after["demo"]["loaded_instances"][0]["config"]["context_length"] == 1024
    assert after["tiny"] == before["tiny"]
    # A member that runs knows more of its model, and contradicts nothing.
    same = ("type", "architecture", "quantization", "max_context_length", "capabilities")
    assert {name: after["demo"][name] for name in same} == {
        name: before["demo"][name] for name in same
    }


@pytest.mark.parametrize(
    ("name", "bits"), [("4 bit", 4), ("16 bit", 16), ("mxfp4", 4), ("gptq", None)]
)
def test_bits_of_a_quantization(name: str, bits: int | None) -> None:
    found = quantization(name)
    assert found is not None and (found.name, found.bits_per_weight) == (name, bits)
    assert quantization("") is None
