"""What stands among the items of an input is read, or refused with its place."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxstack.api.dialects.openai_responses.to_conversation import messages
from mlxstack.api.dialects.openai_responses.tool_names import ToolNames
from mlxstack.core.conversation import Message, Role
from mlxstack.core.preset import ServerSpec
from mlxstack.text.images.marks import mark_of
from mlxstack.text.images.reader import ImageReader
from tests.api.responses.conftest import Scripted
from tests.api.test_served_images import png
from tests.gateway.gateway_thread import WAYS, standing_behind

pytestmark = [pytest.mark.mlx, pytest.mark.net]

COUNT = "/v1/responses/input_tokens"
QUESTION = {"role": "user", "content": "Which word was it?"}
ANSWER = {"role": "assistant", "content": "None."}
READ: list[dict[str, Any]] = [
    {"type": "input_text", "text": "PEAR-77"},
    {"type": "text", "text": "PEAR-77"},
    {"type": "output_text", "text": "PEAR-77", "annotations": []},
    {"type": "refusal", "refusal": "PEAR-77"},
    {"type": "of_the_future", "what": [{"inside": "PEAR-77"}], "encrypted_content": "gAAAA"},
    {"type": "ghost", "content": "PEAR-77"},
]
NOTED = {
    "input_image": {"image_url": "data:image/png;base64,AAAA"},
    "image_url": {"image_url": {"url": "data:image/png;base64,AAAA"}},
    "image": {"data": "AAAA"},
    "input_file": {"file_data": "AAAA"},
    "file": {"file": {"file_data": "AAAA"}},
    "input_audio": {"input_audio": {"data": "AAAA", "format": "wav"}},
}
REFUSED = [
    ({"type": "reasoning_text", "text": "PEAR-77"}, "reasoning_text"),
    ({"type": "summary_text", "text": "PEAR-77"}, "summary_text"),
    ({"type": "encrypted_content", "encrypted_content": "x"}, "encrypted_content"),
    ({"type": "input_text"}, "Field required"),
    ({"type": "input_text", "text": ["PEAR-77"]}, "Field required"),
    ({"type": "refusal", "text": "PEAR-77"}, "Field required"),
    ({"type": ["input_text"], "text": "PEAR-77"}, "type"),
    ({"text": "PEAR-77"}, "type"),
    ({"content": "PEAR-77"}, "type"),
    ({"type": "program"}, "program"),
]


@pytest.mark.parametrize("item", READ, ids=lambda item: str(item["type"]))
def test_text_among_the_items_is_in_the_prompt(scripted: Scripted, item: dict[str, Any]) -> None:
    for items in ([item, QUESTION], [QUESTION, ANSWER, item, QUESTION], [QUESTION, item]):
        asked = scripted.http.post("/v1/responses", json={"model": "m", "input": items})
        assert asked.status_code == 200, asked.text
        assert "PEAR-77" in scripted.prompt()
        assert "gAAAA" not in scripted.prompt()
        counted = scripted.http.post(COUNT, json={"input": items}).json()["input_tokens"]
        assert counted == asked.json()["usage"]["input_tokens"]


@pytest.mark.parametrize("kind", NOTED)
def test_other_parts_are_refused_when_new_and_noted_later(scripted: Scripted, kind: str) -> None:
    part = {"type": kind, **NOTED[kind]}
    for path in ("/v1/responses", COUNT):
        new = scripted.http.post(path, json={"input": [QUESTION, READ[0], part]})
        assert new.status_code == 400
        error = new.json()["error"]
        assert (error["param"], "not supported" in error["message"]) == ("input[2]", True)
    later = [part, READ[0], ANSWER, QUESTION]
    scripted.http.post("/v1/responses", json={"input": later}).raise_for_status()
    assert "omitted]\nPEAR-77" in scripted.prompt()


@pytest.mark.parametrize(("item", "reason"), REFUSED)
def test_what_cannot_be_read_is_refused_with_its_place(
    scripted: Scripted, item: dict[str, Any], reason: str
) -> None:
    for path in ("/v1/responses", COUNT):
        for stream in (False, True):
            body = {"input": [QUESTION, item], "stream": stream}
            answer = scripted.http.post(path, json=body)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"].startswith("input[1]")
            assert error["message"].startswith("input[1]") and reason in error["message"]


def test_a_place_counts_references_that_are_left_out(scripted: Scripted) -> None:
    items = [{"type": "item_reference", "id": "rs_gone"}, {"id": "rs_gone"}, {"type": "input_text"}]
    answer = scripted.http.post("/v1/responses", json={"input": items})
    assert answer.json()["error"]["param"] == "input[2].text"


def test_parts_alone_are_a_message(scripted: Scripted) -> None:
    parts = [{"type": "input_text", "text": "Hello"}, {"type": "input_text", "text": "there"}]
    assert messages(parts, ToolNames()) == (Message(Role.USER, "Hello\nthere"),)
    scripted.http.post("/v1/responses", json={"input": parts}).raise_for_status()
    # The message of the same parts has the same prompt.
    prompt = scripted.prompt()
    same = [{"role": "user", "content": parts}]
    scripted.http.post("/v1/responses", json={"input": same}).raise_for_status()
    assert scripted.prompt() == prompt


def test_items_without_any_message_are_named(scripted: Scripted) -> None:
    thought = {"type": "reasoning", "summary": [], "content": []}
    for items, what in (
        ([thought], "has items of the type reasoning only"),
        ([thought, {"type": "mcp_list_tools", "tools": []}], "reasoning, mcp_list_tools only"),
        ([{"type": "item_reference", "id": "rs_gone"}], "item_reference only"),
        ([], "is empty"),
    ):
        answer = scripted.http.post("/v1/responses", json={"input": items})
        assert answer.status_code == 400
        assert what in answer.json()["error"]["message"]


def test_an_image_among_the_items_is_seen() -> None:
    url = f"data:image/png;base64,{png(1)}"
    part = {"type": "input_image", "image_url": url}
    reader = ImageReader(accepts_images=True)
    (asked,) = messages([part, {"type": "input_text", "text": "Look."}], ToolNames(), reader)
    assert [mark_of(image) for image in asked.images] == [asked.text.partition("\n")[0]]


def test_instructions_as_items_name_their_own_field(scripted: Scripted) -> None:
    body = {"input": "hi", "instructions": [{"type": "input_text"}]}
    answer = scripted.http.post("/v1/responses", json=body)
    assert answer.json()["error"]["param"] == "instructions[0].text"


def test_the_last_configuration_update_counts(scripted: Scripted) -> None:
    def update(**settings: Any) -> dict[str, Any]:
        return {"type": "configuration_update", **settings}

    schema = {"type": "json_schema", "name": "a", "schema": {"const": 5}}
    items = [QUESTION, update(text={"format": schema}), update(reasoning={"effort": "low"})]
    answer = scripted.http.post("/v1/responses", json={"input": items}).json()
    assert answer["reasoning"]["effort"] == "low"
    assert answer["text"]["format"] == schema
    assert '{"const": 5}' in scripted.prompt()
    wrong = scripted.http.post("/v1/responses", json={"input": [update(text=5)]})
    assert wrong.json()["error"]["param"] == "input[0].text"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
@pytest.mark.parametrize("way", WAYS)
def test_a_part_among_messages_is_refused_with_its_place(
    way: str, path: str, tmp_path: Path
) -> None:
    with (
        standing_behind(way, ServerSpec(port=0), tmp_path) as (found, _),
        httpx.Client(base_url=found.url) as http,
    ):
        body = {"messages": [QUESTION, {"type": "text", "text": "PEAR-77"}], "max_tokens": 1}
        answer = http.post(path, json=body)
        assert answer.status_code == 400
        assert "messages[1].role: Field required" in answer.text
