"""A call is forced by name, and with valid arguments, in whatever words a model calls tools."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from msgspec import structs

from tests import models
from tests.api.requests import PLAIN, chat, chat_body, chunks
from tests.api.running import TINY, running, tiny_preset
from tests.features.formats.formats import EACH, FORMATS, PAIRS, Format, template_of
from tests.patience import PATIENCE_S
from tests.repetition import in_soak

pytestmark = [pytest.mark.mlx, pytest.mark.net]

CHAT = "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]},
        "is_kind": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("greet", "visit")
]
KIMI = [
    f"<|tool_call{name}|>"
    for name in ("s_section_begin", "s_section_end", "_begin", "_argument_begin", "_end")
]
HARMONY = [f"<|{name}|>" for name in ("channel", "message", "start", "end", "call", "constrain")]
PYTHON = Format(
    "{%- if m.tool_calls %}{{- '<|tool_call_start|>[' }}"
    + EACH
    + "{{- f.name + '(' }}"
    + PAIRS
    + "{{- k + '=' + (v | tojson) + ('' if loop.last else ', ') }}{%- endfor %}{{- ')' }}"
    "{{- '' if loop.last else ', ' }}{%- endfor %}{{- ']<|tool_call_end|>' }}{%- endif %}"
)
FAMILIES = {
    "qwen3_coder": (FORMATS["coder"], []),
    "glm47": (FORMATS["keys"], ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]),
    "mistral": (FORMATS["endless"], ["[TOOL_CALLS]", "[ARGS]"]),
    "pythonic": (PYTHON, ["<|tool_call_start|>", "<|tool_call_end|>"]),
    "kimi_k2": (FORMATS["section"], KIMI),
    "gemma4": (FORMATS["quoted"], ["<|tool_call>", "<tool_call|>", '<|"|>']),
    "harmony": (FORMATS["channels"], HARMONY),
}
COMMON = ("qwen3_coder", "gemma4", "harmony")


@contextmanager
def speaking(family: str, folder: Path) -> Iterator[httpx.Client]:
    """A tiny service whose tokenizer has the marks of a family, if it is one."""
    form, marks = FAMILIES.get(family, (Format("", reminder="no"), []))
    models.write(folder, {**TINY, "vocab_size": TINY["vocab_size"] + len(marks)})
    _add(folder, form, marks)
    with (
        running(tiny_preset(folder), folder / "home") as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as http,
    ):
        yield http


def _add(folder: Path, form: Format, marks: list[str]) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for at, mark in enumerate(marks, TINY["vocab_size"]):
        # As in the published tokenizers: tags are added tokens, but not special ones.
        added = {"id": at, "content": mark, "special": "arg_" not in mark or "|" in mark, **plain}
        tokenizer["added_tokens"].append(added)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = template_of(structs.replace(form, ending="<|im_end|>"))
    (folder / "chat_template.jinja").write_text(template)


@pytest.mark.parametrize("family", [*COMMON, *in_soak(*sorted(FAMILIES.keys() - set(COMMON)))])
def test_o_tool_choice_forces_the_call(family: str, tmp_path: Path) -> None:
    with speaking(family, tmp_path) as http:
        named: Any = {"type": "function", "function": {"name": "visit"}}
        for seed in range(3):
            more = {"max_tokens": 400, "temperature": 1, "seed": seed}
            made = chat(http, "hi", tools=TOOLS, tool_choice=named, **more)["choices"][0]
            assert made["finish_reason"] == "tool_calls", made
            (call,) = made["message"]["tool_calls"]
            assert call["function"]["name"] == "visit"
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        alone = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
        found = chunks(http, CHAT, chat_body("hi", tools=TOOLS, **alone, **PLAIN, seed=4))
        assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"
        deltas = [one["choices"][0]["delta"].get("tool_calls") for one in found]
        text = "".join(one[0]["function"].get("arguments", "") for one in deltas if one)
        jsonschema.validate(json.loads(text), SCHEMA)


def test_a_model_whose_template_writes_no_calls_is_forced_to_their_json_form(
    tmp_path: Path,
) -> None:
    with speaking("none", tmp_path) as http:
        body = chat_body(tools=TOOLS, tool_choice="required", max_tokens=400)
        choice = http.post(CHAT, json=body).raise_for_status().json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls", choice
        calls = choice["message"]["tool_calls"]
        assert calls
        for call in calls:
            assert call["function"]["name"] in {one["function"]["name"] for one in TOOLS}
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
        assert chat(http, "hi", tools=TOOLS)["choices"]


@pytest.mark.parametrize("family", ["harmony", "qwen3_coder"])
def test_a_call_is_forced_after_the_beginning_of_an_answer(family: str, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I greet:"}]
    asked = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 400}
    with speaking(family, tmp_path) as http:
        body = {**chat_body("hi", **asked), "messages": turns, "continue_final_message": True}
        choice = http.post(CHAT, json=body).raise_for_status().json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls", choice
        assert not choice["message"].get("content"), choice


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_tool_choice_none_keeps_a_model_with_headers_from_a_call(
    choice: str, tmp_path: Path
) -> None:
    with speaking("harmony", tmp_path) as http:
        channel, first = http.post("/tokenize", json={"content": "<|channel|>commentary"}).json()[
            "tokens"
        ][:2]
        plain = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0}
        wish = {"max_tokens": 120, "seed": 1, "logprobs": True, **plain}
        bias = {str(channel): 100, str(first): 100}
        made = chat(http, "hi", tools=TOOLS, tool_choice=choice, logit_bias=bias, **wish)
        said = [one["token"] for one in made["choices"][0]["logprobs"]["content"]]
        opened = [b for a, b in pairwise(said) if a == "<|channel|>"]
        assert len(opened) > 5
        begun = http.post("/detokenize", json={"tokens": [first]}).json()["content"]
        assert (begun not in opened) is (choice == "none")
