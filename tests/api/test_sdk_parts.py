"""Parts of the Vercel AI SDK in contents: read as what they mean, or refused with their place."""

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import convert

from mlxstack.api.dialects.openai_chat.messages import ChatMessageParam, read_messages
from mlxstack.core.conversation import Role
from mlxstack.text.images.marks import mark_of
from mlxstack.text.images.reader import ImageReader
from tests.api.running import answering
from tests.api.test_client_shapes import Prompts
from tests.api.test_served_images import png

pytestmark = pytest.mark.net

CHAT = "/v1/chat/completions"
ASKED: dict[str, Any] = {"role": "user", "content": "Weather in Rome?"}
AGAIN: dict[str, Any] = {"role": "user", "content": "And now?"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "Sunny."}
CITY: dict[str, Any] = {"city": "Rome"}
TEXT: dict[str, Any] = {"type": "text", "text": "I look."}
CALL: dict[str, Any] = {"type": "tool-call", "toolCallId": "c1", "toolName": "weather"}
RESULT: dict[str, Any] = {"type": "tool-result", "toolCallId": "c1", "toolName": "weather"}


def prompt_of(prompts: Prompts, *messages: dict[str, Any]) -> str:
    """The prompt of a chat with these messages."""
    return prompts.of(CHAT, {"messages": messages})


@pytest.fixture(scope="module")
def prompts() -> Iterator[Prompts]:
    with answering() as (engine, http):
        yield Prompts(engine, http)


def calling(*keys: str, text: str = "I look.") -> dict[str, Any]:
    function = {"name": "weather", "arguments": json.dumps(CITY)}
    calls = [{"id": key, "type": "function", "function": function} for key in keys]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def result(content: str, key: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": key, "content": content}


@pytest.mark.parametrize(
    "arguments", [{"args": CITY}, {"input": CITY}, {"input": '{"city":"Rome"}'}]
)
def test_calls_are_calls(prompts: Prompts, arguments: dict[str, Any]) -> None:
    said = {"role": "assistant", "content": [TEXT, {**CALL, **arguments}]}
    answered = {"role": "tool", "content": [{**RESULT, "result": "HOT"}]}
    assert prompt_of(prompts, ASKED, said, answered, AGAIN) == prompt_of(
        prompts, ASKED, calling("c1"), result("HOT"), AGAIN
    )


RESULTS: list[tuple[dict[str, Any], str]] = [
    ({"result": "HOT"}, "HOT"),
    ({"result": {"sky": "blue"}}, '{"sky": "blue"}'),
    ({"result": [1, 2]}, "[1, 2]"),
    ({"result": "no net", "isError": True}, "Error: no net"),
    ({"output": {"type": "text", "value": "HOT"}}, "HOT"),
    ({"output": {"type": "json", "value": {"sky": "blue"}}}, '{"sky": "blue"}'),
    ({"output": {"type": "json", "value": None}}, ""),
    ({"output": {"type": "error-text", "value": "no net"}}, "Error: no net"),
    ({"output": {"type": "error-json", "value": {"code": 5}}}, 'Error: {"code": 5}'),
    ({"output": {"type": "execution-denied", "reason": "too far"}}, "denied by the user: too far"),
    ({"output": {"type": "execution-denied"}}, "denied by the user"),
    ({"output": {"type": "content", "value": [{"type": "text", "text": "HOT"}]}}, "HOT"),
    (
        {
            "output": {
                "type": "content",
                "value": [{"type": "media", "data": "AA==", "mediaType": "image/png"}],
            }
        },
        "[image omitted]",
    ),
    ({"output": {"type": "of_the_future", "what": 1}}, '{"type": "of_the_future", "what": 1}'),
]


@pytest.mark.parametrize(("sent", "text"), RESULTS)
def test_results_are_results(prompts: Prompts, sent: dict[str, Any], text: str) -> None:
    said = {"role": "assistant", "content": [TEXT, {**CALL, "input": CITY}]}
    answered = {"role": "tool", "content": [{**RESULT, **sent}]}
    assert prompt_of(prompts, ASKED, said, answered) == prompt_of(
        prompts, ASKED, calling("c1"), result(text)
    )


def test_several_results_of_one_message_belong_to_their_calls(prompts: Prompts) -> None:
    calls = [{**CALL, "input": CITY, "toolCallId": key} for key in ("c1", "c2")]
    answered = [{**RESULT, "toolCallId": key, "result": key.upper()} for key in ("c2", "c1")]
    prompt = prompt_of(
        prompts,
        ASKED,
        {"role": "assistant", "content": [TEXT, *calls]},
        {"role": "tool", "content": answered},
    )
    assert prompt == prompt_of(
        prompts, ASKED, calling("c1", "c2"), result("C1"), result("C2", "c2")
    )


def test_results_that_the_assistant_has_keep_their_places(prompts: Prompts) -> None:
    """Those of tools that the provider of a model ran."""
    parts = [
        TEXT,
        {**CALL, "input": CITY},
        {**RESULT, "result": "HOT"},
        {"type": "text", "text": "It is hot."},
    ]
    said = {"role": "assistant", "content": parts}
    after = {"role": "assistant", "content": "It is hot."}
    assert prompt_of(prompts, ASKED, said, AGAIN) == prompt_of(
        prompts, ASKED, calling("c1"), result("HOT"), after, AGAIN
    )


def test_a_call_in_two_places_is_one(prompts: Prompts) -> None:
    part = {"type": "tool_use", "id": "c1", "name": "weather", "input": CITY}
    both = {**calling("c1"), "content": [TEXT, part]}
    assert prompt_of(prompts, ASKED, both, result("HOT")) == prompt_of(
        prompts, ASKED, calling("c1"), result("HOT")
    )


def test_reasoning_is_reasoning() -> None:
    parts = [{"type": "reasoning", "text": "Hm."}, {"type": "redacted-reasoning", "data": "x"}]
    messages = [ASKED, {"role": "assistant", "content": [*parts, TEXT]}]
    (_, said) = read_messages(convert(messages, list[ChatMessageParam]))
    assert (said.reasoning, said.text) == ("Hm.", "I look.")
    (_, alone) = read_messages(
        convert([ASKED, {"role": "assistant", "content": parts}], list[ChatMessageParam])
    )
    assert (alone.reasoning, alone.text) == ("Hm.", "")


PNG = png(1)
PICTURES: list[dict[str, Any]] = [
    {"type": "image", "image": PNG, "mediaType": "image/png"},
    {"type": "image", "image": f"data:image/png;base64,{PNG}"},
    {"type": "file", "data": PNG, "mediaType": "image/png"},
    {"type": "file", "data": PNG, "mimeType": "image/png"},
    {"type": "file", "url": f"data:image/png;base64,{PNG}", "mediaType": "image/png"},
]


@pytest.mark.parametrize("part", PICTURES)
def test_images_are_seen_in_every_spelling(part: dict[str, Any]) -> None:
    sent = convert([{"role": "user", "content": [part, TEXT]}], list[ChatMessageParam])
    (asked,) = read_messages(sent, ImageReader(accepts_images=True))
    assert [mark_of(image) for image in asked.images] == [asked.text.partition("\n")[0]]
    shown = {
        "type": "content",
        "value": [{**part, "type": "file-data", "data": PNG, "mediaType": "image/png"}],
    }
    answered = convert(
        [{"role": "tool", "content": [{**RESULT, "output": shown}]}], list[ChatMessageParam]
    )
    (message,) = read_messages(answered, ImageReader(accepts_images=True))
    assert (message.role, len(message.images)) == (Role.TOOL, 1)


def test_files_of_text_are_text(prompts: Prompts) -> None:
    data = base64.b64encode("Über Rom".encode()).decode()
    for part in (
        {"type": "file", "data": data, "mediaType": "text/plain"},
        {"type": "file", "data": f"data:text/markdown;base64,{data}", "mimeType": "text/markdown"},
    ):
        asked = {"role": "user", "content": [{**part, "filename": "rome.txt"}]}
        assert prompt_of(prompts, asked) == prompt_of(
            prompts, {"role": "user", "content": "rome.txt\nÜber Rom"}
        )


UNREAD: list[dict[str, Any]] = [
    {"type": "file", "data": "AAAA", "mediaType": "application/pdf"},
    {"type": "file", "data": "no base64!", "mediaType": "text/plain"},
    {"type": "file", "data": [1, 2], "mediaType": "text/plain"},
    {"type": "image", "image": PNG},
    {"type": "source-url", "url": "https://a/b"},
    {"type": "tool-approval-response", "approvalId": "a", "approved": True},
    {"type": "of_the_future", "what": "PEAR"},
    {"type": "tool-call", "toolName": "weather"},
    {"type": "tool_use", "id": "c1", "name": "weather", "input": {}},
    {"type": "thinking", "thinking": "PEAR"},
    {"type": "text", "value": "PEAR"},
    {"functionCall": {"name": "weather"}},
]


@pytest.mark.parametrize("part", UNREAD, ids=lambda part: str(part.get("type")))
def test_what_cannot_be_read_is_refused_with_its_place(
    prompts: Prompts, part: dict[str, Any]
) -> None:
    refused = prompts.http.post(
        CHAT, json={"messages": [{"role": "user", "content": [TEXT, part]}]}
    )
    assert refused.status_code == 400
    assert refused.json()["error"]["param"].startswith("messages[0].content")


# The template leaves earlier reasoning out.
KEPT = [part for part in UNREAD if part.get("type", "text") not in ("text", "thinking")]


@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool"])
@pytest.mark.parametrize("part", KEPT, ids=lambda part: str(part["type"]))
def test_nothing_of_a_history_vanishes(prompts: Prompts, part: dict[str, Any], role: str) -> None:
    """A refusal would end the session, so that the model sees what was sent, or a note of it."""
    before: list[dict[str, Any]] = [ASKED, calling("c1")] if role == "tool" else [ASKED]
    with_part = {"role": role, "content": [TEXT, part], "tool_call_id": "c1"}
    without = {**with_part, "content": [TEXT]}
    after = [ANSWER, AGAIN]
    assert prompt_of(prompts, *before, with_part, *after) != prompt_of(
        prompts, *before, without, *after
    )


@pytest.mark.parametrize("part", [{"type": "text", "value": 1}, {"type": "text", "text": [1]}])
def test_text_in_an_unknown_form_is_shown_as_json_in_a_result(
    prompts: Prompts, part: dict[str, Any]
) -> None:
    sent = {"role": "tool", "tool_call_id": "c1", "content": [TEXT, part]}
    shown = result(json.dumps([TEXT, part]))
    assert prompt_of(prompts, ASKED, calling("c1"), sent) == prompt_of(
        prompts, ASKED, calling("c1"), shown
    )
    user = {"role": "user", "content": [part]}
    refused = prompts.http.post(CHAT, json={"messages": [user, ANSWER, AGAIN]})
    assert refused.json()["error"]["param"] == "messages[0].content[0].text"


@pytest.mark.parametrize("part", [{"type": "step-start"}, {"type": "text", "text": ""}])
def test_parts_that_say_nothing_say_nothing(prompts: Prompts, part: dict[str, Any]) -> None:
    said = {"role": "assistant", "content": [TEXT]}
    prompt = prompt_of(prompts, ASKED, said, AGAIN)
    assert prompt_of(prompts, ASKED, {**said, "content": [TEXT, part]}, AGAIN).replace(
        "\n", ""
    ) == prompt.replace("\n", "")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "parts": [TEXT]}, "parts"),
        ({"role": "user", "content": "", "parts": [TEXT]}, "parts"),
        (
            {"role": "assistant", "content": "x", "toolInvocations": [{"state": "call"}]},
            "toolInvocations",
        ),
    ],
)
def test_messages_of_a_user_interface_are_refused(
    prompts: Prompts, message: dict[str, Any], field: str
) -> None:
    refused = prompts.http.post(CHAT, json={"messages": [message, ASKED]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == f"messages[0].{field}"
