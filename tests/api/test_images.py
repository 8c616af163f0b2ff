"""Images: one status on every API, and a note in the history, so that a session goes on."""

from typing import Any

import httpx
import pytest

DATA = "data:image/png;base64,iVBORw0KGgo="
OPENAI = {"type": "image_url", "image_url": {"url": DATA}}
RESPONSES = {"type": "input_image", "image_url": DATA}
ANTHROPIC = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
}
CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [user(OPENAI)]}),
        (CHAT, {"messages": [user({"type": "text", "text": "see"}, OPENAI)], "stream": True}),
        ("/v1/batch/chat/completions", {"messages": [user(OPENAI)]}),
        ("/v1/agents/looker/generate", {"messages": [user(OPENAI)]}),
        ("/v1/responses", {"input": [user(RESPONSES)]}),
        (MESSAGES, {"messages": [user(ANTHROPIC)], "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": [user(ANTHROPIC)]}),
        ("/apply-template", {"messages": [user(OPENAI)]}),
        ("/api/chat", {"messages": [{"role": "user", "content": "see", "images": ["iVBORw0="]}]}),
        ("/api/generate", {"prompt": "see", "images": ["iVBORw0KGgo="]}),
        ("/completion", {"prompt": {"prompt_string": "see", "multimodal_data": ["iVBORw0KGgo="]}}),
    ],
)
def test_a_new_image_is_a_400_with_a_reason_on_every_api(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = http.post(path, json={"model": "tiny", **body})
    assert answer.status_code == 400, answer.text
    assert "error" in answer.json()
    if path != "/completion":
        assert "image" in answer.text and "send text" in answer.text


@pytest.mark.parametrize(
    ("path", "image", "body"),
    [(CHAT, OPENAI, {"max_tokens": 4}), (MESSAGES, ANTHROPIC, {"max_tokens": 4})],
)
def test_a_session_with_an_image_in_its_past_goes_on(
    http: httpx.Client, path: str, image: dict[str, Any], body: dict[str, Any]
) -> None:
    past = [user({"type": "text", "text": "look"}, image), {"role": "assistant", "content": "no"}]
    now = {"role": "user", "content": "then read the text"}
    answer = http.post(path, json={"model": "tiny", "messages": [*past, now], **body})
    assert answer.status_code == 200, answer.text
