"""Answers that must look like something: schemas, grammars, forced calls, bounded thoughts."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest

from mlxstack.features.formats.grammar import client_grammars
from tests.api.requests import chat, chat_body, chunks
from tests.api.running import Running
from tests.repetition import in_soak

pytestmark = [pytest.mark.mlx, pytest.mark.net]

CHAT = "/v1/chat/completions"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "is_kind": {"type": "boolean"},
    },
    "required": ["name", "age", "is_kind"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PERSON}}
    for name in ("greet", "visit")
]


def schema_of(random: Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose answers are short, so that a limit never cuts them."""
    leaves: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": random.randrange(1, 5)},
        {"type": "string", "pattern": "^[a-c]{1,5}-[0-9]{2}$"},
        {"type": "string", "format": "date"},
        {"type": "integer", "minimum": -random.randrange(99), "maximum": random.randrange(999)},
        {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
        {"enum": ["red", 7, None, {"deep": [1, "x"]}, 'quo"te']},
        {"const": f"c{random.randrange(99)}"},
    ]
    kind = random.randrange(4 if depth < 2 else 1)
    if depth == 0 or kind == 3:
        names = [f"key {i}" if random.random() < 0.2 else f"k{i}" for i in range(3)]
        names = names[: random.randrange(1, 4)]
        n_required = random.randrange(len(names) + 1)
        return {
            "type": "object",
            "properties": {name: schema_of(random, depth + 1) for name in names},
            "required": names[:n_required],
            "additionalProperties": False,
        }
    if kind == 2:
        items = schema_of(random, depth + 1)
        return {"type": "array", "items": items, "minItems": 1, "maxItems": 2}
    if kind == 1:
        return {"anyOf": [schema_of(random, depth + 1), random.choice(leaves)]}
    return random.choice(leaves)


def asked(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A chat body whose answer must match `schema`; the words differ by schema."""
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    return {**chat_body("go on"), "max_tokens": 600, "response_format": wanted, **more}


def content(http: httpx.Client, body: dict[str, Any]) -> str:
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "stop", choice
    return str(choice["message"]["content"])


@pytest.mark.parametrize("n_schemas", [6, *in_soak(30, 100)])
def test_schemas_hold_alone_and_in_a_batch_whose_free_row_does_not_change(
    http: httpx.Client, n_schemas: int
) -> None:
    free = {**chat_body("sing"), "max_tokens": 150, "ignore_eos": True}
    alone = http.post(CHAT, json=free).raise_for_status().json()["choices"][0]["message"]
    schemas = [schema_of(Random(i)) for i in range(n_schemas)]
    for i, schema in enumerate(schemas):
        jsonschema.validate(json.loads(content(http, asked(schema, temperature=1, seed=i))), schema)
    with ThreadPoolExecutor(3) as pool:
        singing = pool.submit(lambda: http.post(CHAT, json={**free, "cache_prompt": False}))
        bodies = [asked(schema, temperature=1, seed=i) for i, schema in enumerate(schemas)]
        answers = list(pool.map(lambda body: content(http, body), bodies))
        beside = singing.result().json()["choices"][0]["message"]
    for schema, answer in zip(schemas, answers, strict=True):
        jsonschema.validate(json.loads(answer), schema)
    assert beside == alone


def test_o_response_format_a_json_object_is_one_whatever_the_temperature(
    http: httpx.Client,
) -> None:
    body = {**chat_body("go"), "response_format": {"type": "json_object"}, "temperature": 2}
    for seed in range(3):
        choice = http.post(CHAT, json={**body, "max_tokens": 60, "seed": seed}).json()["choices"][0]
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(text), dict)


def test_streams_and_several_choices_are_held_too(http: httpx.Client) -> None:
    found = chunks(http, CHAT, asked(PERSON, n=3, temperature=1, seed=5))
    texts = ["", "", ""]
    for chunk in found:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


def test_responses_hold_text_format(sdk: openai.OpenAI) -> None:
    wanted: Any = {"format": {"type": "json_schema", "name": "p", "schema": PERSON}}
    made = sdk.responses.create(
        model="tiny", input="who?", text=wanted, reasoning={"effort": "none"}, max_output_tokens=300
    )
    jsonschema.validate(json.loads(made.output_text), PERSON)


@pytest.mark.parametrize("where", ["output_config", "output_format"])
def test_messages_hold_their_format(live: Running, where: str) -> None:
    wanted = {"type": "json_schema", "schema": PERSON}
    body = {
        "model": "tiny",
        "max_tokens": 300,
        "messages": [{"role": "user", "content": "who?"}],
        "thinking": {"type": "disabled"},
        where: {"format": wanted} if where == "output_config" else wanted,
    }
    with anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0) as client:
        made = client.post("/v1/messages", body=body, cast_to=anthropic.types.Message)
    assert made.content[0].type == "text"
    jsonschema.validate(json.loads(made.content[0].text), PERSON)


def test_a_grammar_without_any_text_is_refused_without_the_state_of_its_parser(
    http: httpx.Client,
) -> None:
    answer = http.post(CHAT, json=chat_body(grammar="root ::= root"))
    assert answer.status_code == 400
    assert re.fullmatch(r"no answer can follow the grammar: \w+", answer.json()["error"]["message"])


def test_llama_servers_json_schema_and_grammar(http: httpx.Client) -> None:
    plain = {"prompt": "once", "n_predict": 300, "temperature": 1, "seed": 2}
    made = http.post("/completion", json={**plain, "json_schema": PERSON}).json()
    jsonschema.validate(json.loads(made["content"]), PERSON)
    rules = 'root ::= ("yes" | "no") " " [0-9]{3}'
    made = http.post("/completion", json={**plain, "grammar": rules}).json()
    assert made["content"].split(" ")[0] in ("yes", "no")
    assert made["content"].split(" ")[1].isdigit()
    assert made["stop_type"] == "eos"
    said = chat(http, "hello", grammar=rules, max_tokens=30)["choices"][0]["message"]["content"]
    assert said[:2] in ("ye", "no")


CHOICES = ["a (b)", "no\nnever", "1/2 ü::="]
CONSTRAINTS: list[tuple[str, Any, str]] = [
    ("regex", "(yes|no) [0-9]{3}", "(yes|no) [0-9]{3}"),
    ("choice", CHOICES, "|".join(map(re.escape, CHOICES))),
    ("grammar", 'root ::= "x" [0-9]{2}', "x[0-9]{2}"),
]


@pytest.mark.parametrize("form", ["structured_outputs", "guided"])
def test_vllms_constraints_hold(http: httpx.Client, form: str) -> None:
    """The OpenAI SDK sends them by `extra_body`, in the form of either of its generations."""

    def wanted(kind: str, value: Any) -> dict[str, Any]:
        return {form: {kind: value}} if form == "structured_outputs" else {f"guided_{kind}": value}

    for seed, (kind, value, pattern) in enumerate(CONSTRAINTS):
        body = {**wanted(kind, value), "temperature": 1, "seed": seed}
        made = chat(http, "go", **body, max_tokens=60)["choices"][0]["message"]["content"]
        assert re.fullmatch(pattern, made), (kind, made)
        body = {**body, "prompt": "once", "max_tokens": 60}
        made = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        assert re.fullmatch(pattern, made), (kind, made)
    for schema in (PERSON, json.dumps(PERSON)):
        text = content(http, {**chat_body("go", max_tokens=300), **wanted("json", schema)})
        jsonschema.validate(json.loads(text), PERSON)
    prefix = "structured_outputs." if form == "structured_outputs" else "guided_"
    for kind, value in (("regex", "(a"), ("json", "[1]"), ("choice", [7]), ("grammar", "root")):
        refused = http.post(CHAT, json=chat_body(**wanted(kind, value)))
        assert refused.status_code == 400, (kind, refused.text)
        assert f"{prefix}{kind}" in refused.json()["error"]["message"]


@pytest.mark.parametrize("name", ["greet", "visit"])
def test_a_named_tool_is_called_by_that_name_with_valid_arguments(
    http: httpx.Client, name: str
) -> None:
    choice: Any = {"type": "function", "function": {"name": name}}
    made = chat(http, "hi", tools=TOOLS, tool_choice=choice, max_tokens=300)["choices"][0]
    assert made["finish_reason"] == "tool_calls"
    (call,) = made["message"]["tool_calls"]
    assert call["function"]["name"] == name
    jsonschema.validate(json.loads(call["function"]["arguments"]), PERSON)


def test_a_required_call_is_valid_and_a_missing_name_is_refused(http: httpx.Client) -> None:
    body = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    made = chat(http, "hi", **body, max_tokens=300, temperature=1)["choices"][0]
    (call,) = made["message"]["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), PERSON)
    absent = {"type": "function", "function": {"name": "absent"}}
    refused = http.post(CHAT, json=chat_body(tools=TOOLS, tool_choice=absent))
    assert refused.status_code == 400
    assert "absent" in refused.json()["error"]["message"]


def test_a_length_may_be_a_float_without_decimals(http: httpx.Client) -> None:
    """JSON Schema, 4.2.3: 3.0 is an integer; some generators know no other numbers."""
    schema = {"type": "array", "items": {"type": "string", "maxLength": 3.0}, "maxItems": 2.0}
    text = content(http, asked(schema, temperature=1, seed=1))
    jsonschema.validate(json.loads(text), schema)


CHOSEN = {
    "greet": [{"type": "tool", "name": "greet"}],
    "any": ["any", {"type": "any"}, {"type": "required"}],
    "none": [{"type": "none"}],
}


@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
def test_words_of_other_apis_choose_tools(http: httpx.Client, path: str) -> None:
    """Cursor and clients of Mistral's and Anthropic's API write them to the paths of OpenAI's."""
    flat = [{"type": "function", "name": one["function"]["name"], "parameters": PERSON}
            for one in TOOLS]  # fmt: skip
    body = {"input": "hi", "max_output_tokens": 300, "tools": flat}
    body = chat_body(max_tokens=300, tools=TOOLS) if path == CHAT else body
    for name, choices in CHOSEN.items():
        for choice in choices:
            made = http.post(path, json={**body, "tool_choice": choice}).raise_for_status().text
            called = [one for one in ("greet", "visit") if f'"name":"{one}"' in _answered(made)]
            assert (called == []) == (name == "none"), (choice, made)
            assert name != "greet" or called == ["greet"]


def _answered(made: str) -> str:
    """The answer alone, without the tools that a response repeats."""
    read = json.loads(made)
    return json.dumps(read.get("output", read.get("choices")), separators=(",", ":"))


def test_an_object_has_no_other_properties_unless_the_schema_says_so(http: httpx.Client) -> None:
    """A random model would fill an open object until its tokens end."""
    schema = {key: value for key, value in PERSON.items() if key != "additionalProperties"}
    for seed in range(3):
        text = content(http, asked(schema, temperature=1, seed=seed))
        jsonschema.validate(json.loads(text), PERSON)
    tools = [{"type": "function", "function": {"name": "greet", "parameters": schema}}]
    made = chat(http, "hi", tools=tools, tool_choice="required", temperature=1, max_tokens=300)
    for call in made["choices"][0]["message"]["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), PERSON)


def test_lookaround_of_a_pattern_is_left_out(http: httpx.Client) -> None:
    schema = {"type": "string", "maxLength": 4, "pattern": "^(?!x)[a-z]*$"}
    jsonschema.validate(
        json.loads(
            content(http, asked({**PERSON, "properties": {**PERSON["properties"], "name": schema}}))
        ),
        PERSON,
    )


@pytest.mark.parametrize("mode", ["required", "auto"])
def test_only_allowed_tools_are_called(http: httpx.Client, mode: str) -> None:
    def allowing(*names: str) -> Any:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    for name in ("greet", "visit"):
        made = chat(http, "hi", tools=TOOLS, tool_choice=allowing(name), max_tokens=300)
        calls = made["choices"][0]["message"].get("tool_calls") or ()
        assert {call["function"]["name"] for call in calls} <= {name}
        assert calls or mode == "auto"
    refused = http.post(CHAT, json=chat_body(tools=TOOLS, tool_choice=allowing("absent")))
    assert refused.status_code == 400
    assert "absent" in refused.json()["error"]["message"]


def test_responses_call_only_allowed_tools(http: httpx.Client) -> None:
    tools = [{"type": "function", "name": one["function"]["name"], "parameters": PERSON}
             for one in TOOLS]  # fmt: skip
    wanted = {"type": "function", "name": "visit"}
    for choice in (
        {"type": "allowed_tools", "mode": "required", "tools": [wanted]},
        {"type": "function", "function": {"name": "visit"}},
    ):
        body = {"input": "hi", "tools": tools, "tool_choice": choice, "max_output_tokens": 300}
        made = http.post("/v1/responses", json=body).raise_for_status().json()
        names = {item["name"] for item in made["output"] if item["type"] == "function_call"}
        assert names == {"visit"}


def test_messages_force_the_named_tool(live: Running) -> None:
    tools: Any = [{"name": n, "input_schema": PERSON} for n in ("greet", "visit")]
    with anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0) as client:
        made = client.messages.create(
            model="tiny",
            max_tokens=300,
            tools=tools,
            thinking={"type": "disabled"},
            messages=[{"role": "user", "content": "hi"}],
            tool_choice={"type": "tool", "name": "visit"},
        )
    assert made.stop_reason == "tool_use"
    block = made.content[0]
    assert block.type == "tool_use"
    assert block.name == "visit"
    jsonschema.validate(block.input, PERSON)


@pytest.mark.parametrize("budget", [0, 7])
def test_thoughts_end_with_their_budget_and_the_schema_holds_after_them(
    http: httpx.Client, budget: int
) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    body = asked(PERSON, thinking_budget_tokens=budget, temperature=1, seed=1, **thinking)
    made = http.post(CHAT, json=body).json()
    jsonschema.validate(json.loads(made["choices"][0]["message"]["content"]), PERSON)
    assert made["usage"]["completion_tokens_details"]["reasoning_tokens"] <= budget + 1


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "foo"},
        {"$ref": "http://elsewhere/schema"},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": "((a{1,3000}){1,3000}){1,3000}"},
        {"allOf": [{"anyOf": [{"pattern": f".*{i}{j}.*"} for i in range(40)]} for j in range(40)]},
    ],
)
def test_schemas_of_strangers_are_refused_or_served_but_hang_nothing(
    http: httpx.Client, schema: dict[str, Any]
) -> None:
    answer = http.post(CHAT, json={**asked(schema), "max_tokens": 20})
    assert answer.status_code in (200, 400), answer.text
    assert chat(http, "and the next one")["choices"]


def test_a_multiple_of_many_digits_is_refused_in_each_dialect(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 1_000_003}}}
    said = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    form = {"type": "json_schema", "name": "p", "schema": schema}
    for path, body in [
        (CHAT, asked(schema)),
        ("/completion", {"prompt": "once", "json_schema": schema}),
        ("/v1/messages", {**said, "output_config": {"format": form}}),
        ("/v1/responses", {"input": "hi", "text": {"format": form}}),
    ]:
        answer = http.post(path, json=body)
        assert answer.status_code == 400, (path, answer.text)
        assert "multipleOf is 1000003" in answer.json()["error"]["message"]


def test_the_header_names_what_no_call_is_held_to(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 1_000_003}}}
    tools: Any = [{"type": "function", "function": {"name": "count", "parameters": schema}}]
    named = [{"name": "count", "input_schema": schema}]
    said = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "stream": True}
    for path, body in [
        (CHAT, chat_body(tools=tools, tool_choice="required")),
        (CHAT, chat_body(tools=tools)),
        ("/v1/messages", {**said, "tools": named, "tool_choice": {"type": "any"}}),
    ]:
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-mlx-stack-loose-schemas"] == "count/properties/a/multipleOf"
    assert "count/properties/a/multipleOf" in http.get("/props").json()["loose_schemas"]


def test_slow_grammars_do_not_hold_up_other_requests(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_grammars, "LIMIT_S", 0.5)
    primes = (7, 11, 13, 17, 19)
    slow = [
        {"allOf": [{"type": "integer", "minimum": i, "multipleOf": p} for p in primes]}
        for i in range(8)
    ]
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(http.post, CHAT, json=asked(schema)) for schema in slow]
        assert chat(http, "and the next one")["choices"]
        assert not all(one.done() for one in asking), "it did not wait for all of them"
        assert {one.result().status_code for one in asking} <= {400, 503}


def test_what_cannot_be_enforced_is_left_out(http: httpx.Client) -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2, 3]}, "maxItems": 3}
    found = json.loads(content(http, asked(schema)))
    assert set(found) <= {1, 2, 3}


def test_keywords_that_no_answer_is_held_to_are_named(http: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}, "contains": {"const": 2}}},
        "dependentRequired": {"a": ["b"]},
    }
    tools: Any = [{"type": "function", "function": {"name": "count", "parameters": schema}}]
    form = {"type": "json_schema", "schema": schema}
    keywords = ("contains", "dependentRequired")
    header = "x-mlx-stack-loose-schemas"
    for path, body, at in (
        (CHAT, asked(schema, max_tokens=2), "response_format"),
        (CHAT, chat_body(tools=tools, tool_choice="required"), "tools"),
        (CHAT, chat_body(tools=tools), "tools"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "json_schema": schema}, "json_schema"),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2, "text": {"format": form}}, "text"),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        told = answer.headers[header].split(", ")
        assert [one.partition("/")[2] for one in told] == [f"**/{one}" for one in keywords], path
        assert all(one.startswith(at) for one in told)
    assert header not in http.post(CHAT, json=asked({"type": "boolean"})).headers


KEYWORDS: dict[str, Any] = {
    "propertyNames": {"type": "string"},
    "uniqueItems": True,
    "not": {"type": "null"},
    "if": {"required": ["a"]},
    "contains": {"const": 1},
    "dependentRequired": {"a": ["b"]},
    "unevaluatedProperties": False,
}


@pytest.mark.parametrize(("keyword", "value"), KEYWORDS.items())
def test_a_keyword_without_grammar_may_stand_at_several_places(
    http: httpx.Client, keyword: str, value: Any
) -> None:
    kind = "array" if keyword in ("uniqueItems", "contains") else "object"
    part = {"type": kind, "maxItems": 1, "maxProperties": 1, keyword: value}
    schema = {"type": "object", "properties": {"a": part, "b": part, "c": {"const": 1}}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name in ("count", "measure")
    ]
    form = {"type": "json_schema", "name": "a", "schema": schema}
    messages = chat_body()["messages"]
    for path, body in (
        (CHAT, asked(schema, max_tokens=2)),
        (CHAT, chat_body(tools=tools, tool_choice="required")),
        (CHAT, chat_body(tools=tools)),
        ("/v1/responses", {"input": "a", "max_output_tokens": 2, "text": {"format": form}}),
        (
            "/v1/messages",
            {
                "max_tokens": 2,
                "messages": messages,
                "tools": [
                    {"name": tool["function"]["name"], "input_schema": schema} for tool in tools
                ],
            },
        ),
        (
            "/api/chat",
            {
                "messages": messages,
                "stream": False,
                "format": schema,
                "options": {"num_predict": 2},
            },
        ),
    ):
        answer = http.post(path, json={"model": "any", **body})
        assert answer.status_code == 200, (path, answer.text)
        assert keyword in answer.headers["x-mlx-stack-loose-schemas"], path
