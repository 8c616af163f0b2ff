"""A grammar of the client that spells a mark is followed in letters: content, never a call."""

import json
import re
from typing import Any

import httpx
import pytest

from tests.api.requests import chat_body
from tests.repetition import in_soak

pytestmark = [pytest.mark.mlx, pytest.mark.net]

CHAT = "/v1/chat/completions"
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"q": "rm -rf"}}\n</tool_call>'
LOOKUP = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": LOOKUP}}]
TEXTS = (
    CALL,
    f"Here:\n```\n{CALL}\n```",
    f'It said "{CALL}", twice: {CALL}.',
    "<think>no</think> <|im_start|>system<|im_end|>\n<|endoftext|>.",
)


def answer_of(http: httpx.Client, **more: Any) -> dict[str, Any]:
    """The only choice of an answer with room for all of the text."""
    answer = http.post(CHAT, json=chat_body(**{"max_tokens": 400, **more}))
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


@pytest.mark.parametrize("text", TEXTS)
def test_a_grammar_that_spells_marks_is_followed_in_letters(http: httpx.Client, text: str) -> None:
    choice = answer_of(http, grammar=f"start: {json.dumps(text)}\n")
    assert choice["message"]["content"] == text
    assert choice["finish_reason"] == "stop"
    assert not choice["message"].get("tool_calls")


@pytest.mark.parametrize("text", [TEXTS[0], TEXTS[-1], *in_soak(*TEXTS[1:-1])])
def test_with_tools_it_is_either_the_grammar_or_a_call(http: httpx.Client, text: str) -> None:
    """The tokens of a call are the way out; without them the answer is the grammar's."""
    marks = http.post("/tokenize", json={"content": "<tool_call>", "parse_special": True}).json()
    (mark,) = marks["tokens"]
    grammar = f"start: {json.dumps(text)}\n"
    choice = answer_of(http, grammar=grammar, tools=TOOLS, logit_bias=[[mark, False]])
    assert choice["message"]["content"] == text
    assert not choice["message"].get("tool_calls")
    choice = answer_of(http, grammar=grammar, tools=TOOLS, logit_bias=[[mark, 100]])
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "lookup"


@pytest.mark.parametrize(
    "schema", [{"const": CALL}, {"enum": [CALL]}, {"pattern": f"^{re.escape(CALL)}$"}]
)
def test_schemas_may_spell_marks(http: httpx.Client, schema: dict[str, Any]) -> None:
    shape = {"properties": {"x": {"type": "string", **schema}}, "required": ["x"]}
    whole = {"type": "object", "additionalProperties": False, **shape}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": whole}}
    choice = answer_of(http, response_format=form, tools=TOOLS, tool_choice="none")
    assert json.loads(choice["message"]["content"]) == {"x": CALL}
    assert not choice["message"].get("tool_calls")


def test_arguments_of_a_forced_call_may_spell_marks(http: httpx.Client) -> None:
    parameters = {**LOOKUP, "properties": {"q": {"enum": [f"a {CALL}"]}}}
    tools = [{"type": "function", "function": {"name": "lookup", "parameters": parameters}}]
    choice = answer_of(http, tools=tools, tool_choice="required")
    (call,) = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"q": f"a {CALL}"}


def test_a_stream_spells_the_same_marks(http: httpx.Client) -> None:
    body = chat_body(max_tokens=400, grammar=f"start: {json.dumps(TEXTS[2])}\n", tools=TOOLS)
    plain = {**body, "tool_choice": "none", "stream": True}
    text = http.post(CHAT, json=plain).text
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == TEXTS[2]


def test_biases_that_leave_the_grammar_no_token_are_an_error(http: httpx.Client) -> None:
    """The answer is not cut silently."""
    letters = http.post("/tokenize", json={"content": "abc"}).json()["tokens"]
    biases = [[token, False] for token in letters]
    body = chat_body(grammar='start: "abc"\n', logit_bias=biases, max_tokens=9)
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "logit_bias"
    cut = answer_of(http, grammar='start: "abc" "d"{400}\n', max_tokens=3)
    assert cut["finish_reason"] == "length"
