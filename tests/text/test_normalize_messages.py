"""The canonical form of what clients send."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.conversation import Message, Role, Tool
from mlxstack.core.errors import Unsupported
from mlxstack.text.normalize_messages import (
    Definitions,
    drop_billing,
    error_text,
    head_tools,
    parse_arguments,
    plain_text,
    result_text,
    split_thoughts,
    system_text,
    user_message,
)

HEADER = "x-anthropic-billing-header: cc_version=2.1.329.715; cc_entrypoint=sdk-cli;"


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (HEADER, ""),
        (HEADER + "\n", ""),
        (HEADER + "\nYou are an agent.", "You are an agent."),
        (HEADER + " cc_is_subagent=true; cch=a5145;You are an agent.", "You are an agent."),
        (HEADER + " cch=a5145;\n\nBe brief; a=b; c", "\nBe brief; a=b; c"),
        ("x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli\nYou", "You"),
        ("You are x-anthropic-billing-header: a=b;", "You are x-anthropic-billing-header: a=b;"),
    ],
)
def test_c1_billing_header_is_dropped_in_all_its_forms(text: str, rest: str) -> None:
    assert drop_billing(text) == rest


def test_c1_prompts_of_two_conversations_have_one_system_text() -> None:
    blocks = [{"type": "text", "text": HEADER}, {"type": "text", "text": "You are an agent."}]
    other = [
        {"type": "text", "text": HEADER.replace("715", "3f6") + " cch=0f0f0;"},
        {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
    ]
    assert system_text(blocks) == system_text(other) == system_text("You are an agent.")


@given(st.text())
def test_c3_a_string_is_one_text_block(text: str) -> None:
    block = {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
    assert plain_text([block]) == plain_text(text) == text


def test_c9_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert plain_text(parts) == "ab"
    assert plain_text(parts, "\n") == "a\nb"
    assert plain_text(None) == ""


def test_an_image_is_refused_in_words() -> None:
    with pytest.raises(Unsupported, match="image input is not supported"):
        plain_text([{"type": "image", "source": {}}])


def test_c4_arguments_keep_the_order_of_their_keys() -> None:
    arguments = parse_arguments('{"zebra":1,"ant":{"b":2,"a":3}}')
    assert json.dumps(arguments) == '{"zebra": 1, "ant": {"b": 2, "a": 3}}'


@given(st.text() | st.none() | st.integers() | st.dictionaries(st.text(), st.integers()))
def test_o3_arguments_never_fail(arguments: object) -> None:
    assert isinstance(parse_arguments(arguments), dict | str)


def test_o3_half_a_letter_in_arguments_becomes_one_that_can_be_written() -> None:
    arguments = parse_arguments(r'{"\udfff": ["\ud800x", {"a": "\ud83d\ude00"}], "n": 1}')
    assert arguments == {"\ufffd": ["\ufffdx", {"a": "\U0001f600"}], "n": 1}


def test_o3_broken_arguments_stay_as_they_are() -> None:
    assert parse_arguments('{"path": "a') == '{"path": "a'
    assert parse_arguments("[1]") == "[1]"
    assert parse_arguments("") == {}


def test_a10_results_come_before_what_the_user_said() -> None:
    results = [Message(Role.TOOL, "1", tool_call_id="a"), Message(Role.TOOL, "2")]
    assert user_message(results, "and now?") == (*results, Message(Role.USER, "and now?"))
    assert user_message(results, "") == tuple(results)


def test_a11_an_error_is_marked_once() -> None:
    assert error_text("no such file") == "Error: no such file"
    assert error_text("Error: no such file") == "Error: no such file"


def test_a20_deferred_tools_leave_the_head_and_are_described_in_place() -> None:
    fetch = Tool("WebFetch", "get a page", {"type": "object"}, is_deferred=True)
    bash = Tool("Bash")
    assert head_tools([fetch, bash]) == (bash,)
    assert Definitions([fetch, bash]).text(["WebFetch"]) == (
        '<functions>\n<function>{"description": "get a page", "name": "WebFetch", '
        '"parameters": {"type": "object"}}</function>\n</functions>'
    )


def test_a20_references_in_a_result_are_expanded() -> None:
    fetch = Tool("WebFetch", "get a page", is_deferred=True)
    content = [
        {"type": "text", "text": "found:"},
        {"type": "tool_reference", "tool_name": "WebFetch"},
        {"type": "tool_reference", "tool_name": "Unknown"},
    ]
    lines = result_text(content, Definitions([fetch])).splitlines()
    assert lines[:2] == ["found:", "<functions>"]
    assert '"name": "WebFetch"' in lines[2]
    assert '"name": "Unknown"' in lines[3]
    assert result_text([{"type": "text", "text": "a"}, {"text": "b"}], Definitions([])) == "a\nb"
    assert result_text("plain", Definitions([])) == "plain"


def test_c5_thoughts_inside_a_text_are_found() -> None:
    assert split_thoughts("<think>\nhm\n</think>\n\nyes", "<think>", "</think>") == ("hm", "yes")
    assert split_thoughts("no <think>x</think>", "<think>", "</think>") == (
        None,
        "no <think>x</think>",
    )
