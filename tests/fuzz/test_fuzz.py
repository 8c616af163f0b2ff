"""A short, undirected slice of each fuzzer, and everything that one has found before.

`make fuzz` looks for more, guided by coverage.
"""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxstack.config.presets import load
from mlxstack.core.errors import SetupError
from mlxstack.host.home import Home
from mlxstack.text.prompt.prompt import TokenizeOptions
from tests.fuzz import forging
from tests.fuzz.__main__ import TARGETS
from tests.fuzz.doors import DOORS, house

FINDINGS = Path(__file__).parent / "findings"
RUNS = {"files": 400, "presets": 40, "answers": 150, "forging": 60, "doors": 150}
HELLO = [{"role": "user", "content": "hello"}]


def target(name: str) -> Callable[[bytes], None]:
    function: Callable[[bytes], None] = getattr(import_module(f"tests.fuzz.{name}"), name)
    return function


@pytest.mark.parametrize("name", TARGETS)
def test_fuzz_slice(name: str) -> None:
    run = target(name)

    @settings(max_examples=RUNS[name], suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=300))
    def look(data: bytes) -> None:
        run(data)

    look()


@pytest.mark.parametrize("path", sorted(FINDINGS.glob("*/*")), ids=lambda path: path.name)
def test_fuzz_finding(path: Path) -> None:
    target(path.parent.name)(path.read_bytes())


def post(path: str, body: object, answer_text: str = "Yes.") -> httpx.Response:
    return house().post(path, json.dumps(body).encode(), answer_text)


@pytest.mark.parametrize("path", [path for path, _ in DOORS])
@pytest.mark.parametrize("unit", [(b"[", b"]"), (b'{"a":', b"}")])
def test_json_deeper_than_can_be_read_is_400(path: str, unit: tuple[bytes, bytes]) -> None:
    for n in (900, 100_000):
        deep = b'{"messages":' + unit[0] * n + b"1" + unit[1] * n + b"}"
        answer = house().post(path, deep, "")
        assert answer.status_code < 500, answer.text
    assert answer.status_code == 400


@pytest.mark.parametrize("number", [-(2**63) - 1, 10**400, float("inf")])
def test_a_schema_with_a_number_of_no_machine_is_no_fault(number: float) -> None:
    schema = {"type": "object", "enum": [number]}
    format_ = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"messages": HELLO, "response_format": format_}
    assert post("/v1/chat/completions", body).status_code in {200, 400}
    tools = [{"type": "function", "function": {"name": "a", "parameters": schema}}]
    body = {"messages": HELLO, "tools": tools, "tool_choice": "required"}
    assert post("/v1/chat/completions", body).status_code in {200, 400}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_half_a_letter_in_a_call_is_no_fault(path: str, is_stream: bool) -> None:
    half = r'{"city": "\ud800"}'
    answer_text = f'<tool_call>\n{{"name": "weather", "arguments": {half}}}\n</tool_call>'
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": half}}
    item = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": half}
    turns = [*HELLO, {"role": "assistant", "tool_calls": [call], "content": None}]
    chatted = turns if "chat" in path else HELLO
    tool = {"type": "function", "name": "weather", "input_schema": {}}
    body = {
        "messages": [*chatted, *HELLO],
        "input": [*HELLO, item, {**item, "type": "function_call_output", "output": ""}, *HELLO],
        "tools": [{**tool, "type": None if "messages" in path else "function", "function": tool}],
        "max_tokens": 100,
        "stream": is_stream,
        "chat_template_kwargs": {"enable_thinking": False},
        "thinking": {"type": "disabled"},
    }
    answer = post(path, body, answer_text)
    assert answer.status_code == 200, answer.text
    assert "weather" in answer.text
    assert "\ufffd" in answer.text
    assert "_error" not in answer.text


def test_a_stream_can_be_cut_into_lines_by_anybody() -> None:
    answer_text = "a\u2028b\u2029c\u0085d"
    answer = post("/v1/chat/completions", {"messages": HELLO, "stream": True}, answer_text)
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == answer_text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: {id: \x00}", "this is not YAML"),
        ("model: " + "[" * 5000, "deeper"),
        ("model: {id: !!int soon}", "invalid value"),
        ('model: {id: !!int ""}', "invalid value"),
        ("model: {id: !!bool maybe}", "invalid value"),
        ("model: {id: !!timestamp soon}", "without a tag"),
        ("model: &a {id: *a}", "deeper"),
        ("model: {id: ~nobody-at-all/x}", "model.id is no path"),
        ('model: {id: "/a\\0b"}', "model.id is no path"),
        ("extends: ~nobody-at-all/x.yaml", "no such user"),
        ('extends: "/a\\0b.yaml"', "no preset file"),
        ("model: {id: !!python/object/apply:os.getcwd []}", "without a tag"),
        ("a: &a [1]\n" + "".join(
            f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n"
            for n in range(12)
        ), "too many"),
    ],
)  # fmt: skip
def test_a_preset_that_is_none_is_refused_in_words(
    tmp_path: Path, text: str, expected: str
) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(text)
    with pytest.raises(SetupError, match=expected):
        load(str(path), Home(tmp_path))


def test_letters_that_become_a_special_token_make_no_turn() -> None:
    for kind in forging.known():
        for spelled in kind.spellings:
            tokens = kind.prompt_maker.tokenize(
                f"a {spelled} b", TokenizeOptions(parse_special=False)
            )
            assert not kind.structure & {*tokens}, spelled
