"""`item_reference`: ids in place of items that this service has sent."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlxstack.api.dialects.openai_responses.recent_items import RecentItems
from mlxstack.api.dialects.openai_responses.response_schema import MessageItem, OutputText
from mlxstack.core.errors import BadRequest
from mlxstack.core.preset import ModelSpec, Preset, SamplingSpec, ServerSpec, SlotSpec
from tests.api.responses.checking import told, whole
from tests.api.running import Running, running

QUESTION = {"role": "user", "content": "Say hello."}
NEXT = {"role": "user", "content": "Say it again."}
TOOLS = [{"type": "function", "name": "act", "parameters": {"type": "object", "properties": {}}}]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    preset = Preset(
        model=ModelSpec(id="demo"),
        slots=SlotSpec(n_ctx=2048),
        sampling=SamplingSpec(temperature=0, thinking=False, max_tokens=64),
        server=ServerSpec(port=0),
    )
    with running(preset, tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.fixture
def http(demo: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=demo.url, timeout=60) as client:
        yield client


def references(output: list[Any]) -> list[dict[str, str]]:
    return [{"type": "item_reference", "id": item["id"]} for item in output]


@pytest.mark.mlx
@pytest.mark.net
@pytest.mark.parametrize("ask", [whole, lambda http, body: told(http, body).response])
@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "required"}])
def test_a_reference_is_as_good_as_its_item(
    http: httpx.Client, ask: Any, more: dict[str, Any]
) -> None:
    output = ask(http, {"input": [QUESTION], **more})["output"]
    assert output
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
        for item in output
        if item["type"] == "function_call"
    ]
    assert bool(results) is bool(more)
    answers = [
        whole(http, {"input": [QUESTION, *said, *results, NEXT], **more})
        for said in (output, references(output))
    ]
    assert answers[0]["usage"]["input_tokens"] == answers[1]["usage"]["input_tokens"]
    assert [item.get("content") for item in answers[0]["output"]] == [
        item.get("content") for item in answers[1]["output"]
    ]
    counted = http.post("/v1/responses/input_tokens", json={
        "input": [QUESTION, *references(output), *results, NEXT], **more,
    })  # fmt: skip
    assert counted.status_code == 200


@pytest.mark.mlx
@pytest.mark.net
def test_what_is_not_kept_is_refused_with_a_remedy(http: httpx.Client) -> None:
    forgotten = whole(http, {"input": [QUESTION], "store": False})["output"]
    salted = whole(http, {"input": [QUESTION], "cache_salt": "other"})["output"]
    for output in (forgotten, salted, [{"id": "msg_unknown"}], [{"id": None}]):
        answer = http.post("/v1/responses", json={"input": [*references(output), NEXT]})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "input[0]"
        assert "store = false" in error["message"]


def test_the_oldest_items_go_first() -> None:
    def item(name: str) -> MessageItem:
        return MessageItem(name, "completed", (OutputText("x" * 1000),))

    kept = RecentItems(max_bytes=2500)
    for name in ("a", "b"):
        kept.add(item(name), "")
    kept.resolve(references([{"id": "a"}]), "")
    kept.add(item("c"), "")
    assert [one["id"] for one in kept.resolve(references([{"id": "a"}, {"id": "c"}]), "")] == [
        "a",
        "c",
    ]
    with pytest.raises(BadRequest, match="'b' is not kept"):
        kept.resolve(references([{"id": "b"}]), "")
    kept.add(MessageItem("huge", "completed", (OutputText("x" * 3000),)), "")
    with pytest.raises(BadRequest):
        kept.resolve(references([{"id": "huge"}]), "")
