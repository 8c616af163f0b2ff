"""Draft tokens are told where clients of OpenAI, llama-server and Prometheus look for them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families as families

from mlxstack.client.types import PropsResponse
from mlxstack.core.preset import ModelSpec, Preset, ServerSpec, SlotSpec, Speculation
from mlxstack.policy.pass_layout import UNMEASURED
from tests.api.requests import chat, chat_body, chunks
from tests.api.running import running, tiny_preset
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a_rather_long_name": {"type": "boolean"},
        "another_rather_long_name": {"enum": ["one constant of many letters", "and another one"]},
    },
    "required": ["a_rather_long_name", "another_rather_long_name"],
    "additionalProperties": False,
}
WANTED: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}},
    "max_tokens": 200,
}


@pytest.fixture(scope="module")
def drafting(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a service that drafts."""
    preset = tiny_preset(model_folder, speculation=Speculation.AUTO)
    with running(preset, tmp_path_factory.mktemp("drafting")) as found:
        yield found.url


@pytest.fixture
def auto(drafting: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=drafting, timeout=PATIENCE_S) as client:
        yield client


def test_accepted_and_rejected_tokens_are_told(auto: httpx.Client) -> None:
    before = drafted(auto)
    answer = chat(auto, **WANTED)
    details = answer["usage"]["completion_tokens_details"]
    n_accepted = details["accepted_prediction_tokens"]
    n_drafted = n_accepted + details["rejected_prediction_tokens"]
    assert 0 < n_accepted < answer["usage"]["completion_tokens"]
    timings = answer["timings"]
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (n_drafted, n_accepted)
    after = drafted(auto)
    assert after[0] - before[0] == n_drafted
    assert after[1] - before[1] == n_accepted
    assert 0 < after[2] - before[2] <= n_drafted


def test_a_stream_tells_them_at_its_end(auto: httpx.Client) -> None:
    body = chat_body("tell me", **WANTED, stream_options={"include_usage": True})
    last = chunks(auto, "/v1/chat/completions", body)[-1]
    assert last["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    assert last["timings"]["draft_n_accepted"] > 0


def test_off_drafts_nothing_and_says_the_same(auto: httpx.Client, http: httpx.Client) -> None:
    answers = [chat(client, **WANTED, temperature=1, seed=4) for client in (auto, http)]
    assert drafted(http) == (0, 0, 0)
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0] == texts[1]
    assert "draft_n" in answers[0]["timings"]
    assert "draft_n" not in answers[1]["timings"]
    details = answers[1]["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == details["rejected_prediction_tokens"] == 0


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of the demo model, which drafts whatever a pass costs."""
    preset = Preset(
        model=ModelSpec(id="demo"),
        slots=SlotSpec(count=2, n_ctx=1024),
        server=ServerSpec(port=0),
        speculation=Speculation.AUTO,
    )
    with running(preset, tmp_path_factory.mktemp("demo")) as found:
        found.service.engine.loaded.loop.batch.proposer.costs = UNMEASURED  # type: ignore[attr-defined]
        with httpx.Client(base_url=found.url, timeout=PATIENCE_S) as client:
            yield client


def test_a_predicted_answer_is_drafted_and_a_wrong_one_changes_nothing(demo: httpx.Client) -> None:
    ask = {"text": "Which tools do you know?", "max_tokens": 60, "cache_prompt": False}
    plain = chat(demo, **ask)
    told = plain["choices"][0]["message"]["content"]
    half = len(told) // 2
    parts = [{"type": "text", "text": told[:half]}, {"type": "text", "text": told[half:]}]
    for content in (told, parts):
        found = chat(demo, **ask, prediction={"type": "content", "content": content})
        assert found["choices"] == plain["choices"]
        usage = found["usage"]
        n_accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
        assert n_accepted >= 0.6 * usage["completion_tokens"]
    wrong = {"type": "content", "content": told.swapcase() * 3}
    assert chat(demo, **ask, prediction=wrong)["choices"] == plain["choices"]
    for bad, param in (
        ({"type": "image", "content": told}, "prediction.type"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ({"type": "content", "content": "far too long " * 1024}, "prediction.content"),
    ):
        refusal = demo.post("/v1/chat/completions", json=chat_body(prediction=bad))
        assert refusal.status_code == 400
        assert refusal.json()["error"]["param"] == param


def test_agents_requests_and_slots_tell_how_drafts_fared(auto: httpx.Client) -> None:
    answer = chat(auto, **WANTED, agent="counted")
    told = answer["timings"]["draft_n"], answer["timings"]["draft_n_accepted"]
    assert told[0] > 0
    agent = auto.get("/v1/agents/counted").json()
    assert (agent["n_drafted"], agent["n_accepted"]) == told
    slots = auto.get("/slots").json()
    assert all(slot["speculative"] for slot in slots)
    (slot,) = (one for one in slots if one["agent"] == "counted")
    assert (slot["draft_n"], slot["draft_n_accepted"]) == told


def test_a_draft_model_is_named_and_its_tokens_are_counted(
    model_folder: Path, tmp_path: Path, http: httpx.Client
) -> None:
    preset = tiny_preset(model_folder, speculation=Speculation.AUTO)
    preset = replace(preset, model=replace(preset.model, draft=str(model_folder)))
    with (
        running(preset, tmp_path) as found,
        httpx.Client(base_url=found.url, timeout=PATIENCE_S) as client,
    ):
        found.service.engine.loaded.loop.batch.proposer.costs = UNMEASURED  # type: ignore[attr-defined]
        props = client.get("/props").json()
        assert props["draft_model"] == str(model_folder)
        remarks = msgspec.convert(props, PropsResponse).remarks
        assert f"drafting with {model_folder}" in remarks
        said = [chat(each, text="tell me", max_tokens=60, seed=3) for each in (client, http)]
        numbers = metrics(client)
    texts = [answer["choices"][0]["message"]["content"] for answer in said]
    assert texts[0] == texts[1]
    names = ("tokens", "tokens_accepted")
    told = [numbers[f"mlxstack_draft_model_{name}_total"] for name in names]
    assert 0 < told[1] <= told[0]
    assert said[0]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] >= told[1]
    assert http.get("/props").json()["draft_model"] is None


def metrics(http: httpx.Client) -> dict[str, float]:
    each = families(http.get("/metrics").text)
    return {sample.name: sample.value for family in each for sample in family.samples}


def drafted(http: httpx.Client) -> tuple[float, float, float]:
    """The totals of `/metrics`: drafted tokens, accepted tokens, drafts."""
    found = metrics(http)
    names = ("draft_tokens", "accepted_tokens", "drafts")
    tokens, accepted, drafts = (found[f"llamacpp:spec_decode_num_{name}_total"] for name in names)
    return tokens, accepted, drafts
