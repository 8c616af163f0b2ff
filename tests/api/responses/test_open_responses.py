"""Responses have the fields that the Open Responses specification (2026-04-24) requires."""

from typing import Any

import openai.types.responses
import pytest

from tests.api.responses.checking import told, whole
from tests.api.responses.conftest import Scripted

pytestmark = [pytest.mark.mlx, pytest.mark.net]

REQUIRED = frozenset({
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model",
    "previous_response_id", "instructions", "output", "error", "tools", "tool_choice", "truncation",
    "parallel_tool_calls", "text", "top_p", "presence_penalty", "frequency_penalty", "top_logprobs",
    "temperature", "reasoning", "usage", "max_output_tokens", "max_tool_calls", "store",
    "background", "service_tier", "metadata", "safety_identifier", "prompt_cache_key",
})  # fmt: skip
NOT_NULL = frozenset({
    "top_p", "temperature", "presence_penalty", "frequency_penalty", "top_logprobs", "store",
    "background", "service_tier", "metadata", "tools", "text", "parallel_tool_calls", "truncation",
})  # fmt: skip
TOOL = {"type": "function", "name": "act", "parameters": {"type": "object"}}
SENT: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": -0.25,
    "max_tool_calls": 3,
    "safety_identifier": "user-1",
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "metadata": {"a": "b"},
}


def require_complete(response: dict[str, Any]) -> None:
    assert response.keys() >= REQUIRED
    assert {name for name in NOT_NULL if response[name] is None} == set()
    openai.types.responses.Response.model_validate(response)


@pytest.mark.parametrize("sent", [{}, SENT, {"tools": [TOOL]}, {"max_output_tokens": 1}])
def test_every_response_has_every_field(scripted: Scripted, sent: dict[str, Any]) -> None:
    body = {"input": "hi", **sent}
    require_complete(whole(scripted.http, body))
    responses = [
        event["response"] for event in told(scripted.http, body).events if "response" in event
    ]
    assert len(responses) >= 3
    for response in responses:
        require_complete(response)


def test_what_the_request_set_is_repeated(scripted: Scripted) -> None:
    response = whole(scripted.http, {"input": "hi", **SENT})
    assert {name: response[name] for name in SENT} == {**SENT, "service_tier": "default"}
    plain = whole(scripted.http, {"input": "hi"})
    assert (plain["presence_penalty"], plain["frequency_penalty"]) == (0, 0)
    assert (plain["max_tool_calls"], plain["safety_identifier"]) == (None, None)


def test_a_field_of_another_type_is_not_repeated(scripted: Scripted) -> None:
    odd = {"max_tool_calls": "3", "safety_identifier": 5, "service_tier": {}, "metadata": []}
    response = whole(scripted.http, {"input": "hi", **odd})
    require_complete(response)
    assert (response["max_tool_calls"], response["safety_identifier"]) == (None, None)


def test_a_function_is_repeated_with_all_its_fields(scripted: Scripted) -> None:
    custom = {"type": "custom", "name": "patch"}
    response = whole(scripted.http, {"input": "hi", "tools": [TOOL, custom]})
    assert response["tools"] == [{**TOOL, "description": None, "strict": None}, custom]
