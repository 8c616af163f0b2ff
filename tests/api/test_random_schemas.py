"""Random schemas in every dialect, as tools and formats: an answer or a refusal, never a fault."""

from random import Random
from typing import Any

import httpx
import pytest

from tests.api.requests import chat_body
from tests.repetition import in_soak
from tests.text.random_schemas import SchemaMaker

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

CHAT = "/v1/chat/completions"
N_SCHEMAS = 8
GOOD = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}


def bodies(schema: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Requests with this schema, as a format and as a tool beside another."""
    form = {"type": "json_schema", "name": "a", "schema": schema}
    known = (("good", GOOD), ("odd", schema))
    functions = [{"name": name, "parameters": parameters} for name, parameters in known]
    tools = [{"type": "function", "function": function} for function in functions]
    flat = [{"type": "function", **function} for function in functions]
    inputs = [{"name": name, "input_schema": parameters} for name, parameters in known]
    return [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": form}}),
        (CHAT, {"tools": tools}),
        (CHAT, {"tools": tools, "tool_choice": "required"}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2, "text": {"format": form}}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2, "tools": flat}),
        ("/v1/messages", {"tools": inputs, "tool_choice": {"type": "any"}}),
        ("/v1/messages", {"tools": inputs, "stream": True}),
        ("/api/chat", {"stream": False, "format": schema, "options": {"num_predict": 2}}),
        ("/api/chat", {"stream": False, "tools": tools, "options": {"num_predict": 2}}),
        ("/completion", {"prompt": "a", "n_predict": 2, "json_schema": schema}),
    ]


@pytest.mark.parametrize("seed", [0, *in_soak(*range(1, 200))])
def test_a_schema_is_answered_or_refused(http: httpx.Client, seed: int) -> None:
    for index in range(N_SCHEMAS):
        schema = SchemaMaker(Random(f"{seed} {index}"), fault_rate=0.15).root()
        for path, more in bodies(schema):
            body = {"model": "any", "messages": chat_body()["messages"], "max_tokens": 2, **more}
            if path in ("/v1/responses", "/completion"):
                del body["messages"]
            answer = http.post(path, json=body)
            is_tool = "tools" in more
            assert answer.status_code in ((200,) if is_tool else (200, 400)), (
                path,
                answer.text,
                schema,
            )
            if answer.status_code == 400:
                assert "schema" in answer.text, (path, answer.text)
