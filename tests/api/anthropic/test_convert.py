"""What Anthropic's messages mean: pure conversions, without a server."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.api.dialects.anthropic.request_schema import MessageParam, MessagesBody, ToolParam
from mlxstack.api.dialects.anthropic.to_conversation import KINDS, conversation
from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.core.errors import BadRequest

WEATHER = {
    "name": "weather",
    "description": "Tells it.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
FETCH = {
    "name": "WebFetch",
    "description": "Gets a page.",
    "input_schema": {"type": "object"},
    "defer_loading": True,
}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


def meant(messages: Any, client: str = "", **more: Any) -> Conversation:
    body = msgspec.convert({"messages": messages, **more}, MessagesBody)
    return conversation(body, client=client)


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def text(expected: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": expected, **more}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content, **more}


HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "header",
    [
        "x-anthropic-billing-header: cc_version=2.1.329.715; cc_entrypoint=sdk-cli;",
        "x-anthropic-billing-header: cc_version=2.1.329.3f6; cc_entrypoint=cli; cch=a5145;",
        "x-anthropic-billing-header: cc_version=2.1.1.1; cc_is_subagent=true;",
    ],
)
def test_c1_billing_headers_leave_no_trace(header: str) -> None:
    bare = meant(HI, system="You help.")
    assert meant(HI, system=[text(header), text("You help.")]) == bare
    assert meant(HI, system=f"{header}\nYou help.") == bare
    assert meant(HI, system=f"{header}You help.") == bare
    assert meant(HI, system=[text(header)]) == meant(HI)


def test_c2_c3_clothes_of_the_same_words() -> None:
    moved = {"cache_control": {"type": "ephemeral"}}
    bare = meant(HI, system="ab")
    assert meant([user(text("hi", **moved))], system=[text("a"), text("b", **moved)]) == bare
    assert meant([user(text("hi"))], system=[text("ab", **moved)]) == bare


def test_a10_results_come_first_and_in_order() -> None:
    found = meant(
        [
            *HI,
            user(
                text("look"),
                result([text("one"), text("two")]),
                result("three", tool_use_id="t2"),
                text("again"),
            ),
        ]
    )
    assert [(m.role, m.text, m.tool_call_id) for m in found.messages[1:]] == [
        (Role.TOOL, "one\ntwo", "t1"),
        (Role.TOOL, "three", "t2"),
        (Role.USER, "look\nagain", None),
    ]


def test_a11_a_failure_is_told_once() -> None:
    for said in ("no such file", "Error: no such file"):
        found = meant([*HI, user(result(said, is_error=True))])
        assert found.messages[-1].text == "Error: no such file"
    assert meant([*HI, user(result("fine", is_error=False))]).messages[-1].text == "fine"
    assert meant([*HI, user(result(None))]).messages[-1].text == ""


def test_a12_a_late_system_message_stays_in_its_place() -> None:
    found = meant(
        [
            *HI,
            {"role": "system", "content": [text("a"), text("b")], "clear_at": "never"},
            {"role": "assistant", "content": "ok"},
            {"role": "system", "content": "c"},
            *HI,
        ]
    )
    roles = [(m.role.value, m.text) for m in found.messages]
    assert roles == [
        ("user", "hi"), ("system", "a\nb"), ("assistant", "ok"), ("system", "c"), ("user", "hi"),
    ]  # fmt: skip


def test_a12_reminders_of_claude_code_come_before_its_first_question() -> None:
    """As it writes them itself for models of Anthropic's; later ones stay where they are."""
    late = {"role": "system", "content": [text("skills"), text("date")]}
    first = [user(text("<system-reminder>\ngit\n</system-reminder>\n"), text("look")), late]
    later = [{"role": "assistant", "content": "ok"}, {"role": "system", "content": "c"}, *HI]
    opened = (
        "user",
        "<system-reminder>\nskills\ndate\n</system-reminder>\n\n"
        "<system-reminder>\ngit\n</system-reminder>\n\nlook",
    )
    for more in ([], later):
        found = meant([*first, *more], "claude-cli", system="s")
        roles = [(m.role.value, m.text) for m in found.messages]
        assert roles[:2] == [("system", "s"), opened]
    assert roles[2:] == [("assistant", "ok"), ("system", "c"), ("user", "hi")]
    assert meant(HI, "claude-cli") == meant(HI)


def test_c4_c5_an_assistant_turn_in_all_its_parts() -> None:
    found = meant(
        [
            *HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "zzz"},
                    text("I "),
                    text("look."),
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"b": 1, "a": 2}},
                ],
            },
            user(result("sunny")),
        ]
    )
    turn = found.messages[1]
    assert (turn.text, turn.reasoning) == ("I look.", "hm")
    (call,) = turn.tool_calls
    assert isinstance(call.arguments, dict)
    assert list(call.arguments.items()) == [("b", 1), ("a", 2)]


SEARCH = {
    "type": "server_tool_use",
    "id": "s1",
    "name": "web_search",
    "input": {"query": "rome weather"},
}
FOUND = [
    {
        "type": "web_search_result",
        "url": "https://weather.example/rome",
        "title": "Rome",
        "page_age": "1 day",
        "encrypted_content": "SECRET",
    }
]


def found_by(key: str, content: Any, kind: str = "web_search_tool_result") -> dict[str, Any]:
    return {"type": kind, "tool_use_id": key, "content": content}


def test_searches_of_a_server_are_calls_with_their_results() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    said = [
        *(text("I search."), SEARCH, {**SEARCH, "id": "s2"}),
        *(found_by("s1", FOUND), found_by("s2", {"type": "error", "error_code": "unavailable"})),
        *(text("Sunny."), call),
    ]
    found = meant([*HI, {"role": "assistant", "content": said}, user(result("ok"))]).messages[1:]
    assert [(m.role.value, m.tool_call_id, [c.id for c in m.tool_calls]) for m in found] == [
        ("assistant", None, ["s1", "s2"]),
        ("tool", "s1", []),
        ("tool", "s2", []),
        ("assistant", None, ["t1"]),
        ("tool", "t1", []),
    ]
    assert (found[0].text, found[3].text) == ("I search.", "Sunny.")
    assert "weather.example" in found[1].text and "SECRET" not in found[1].text
    assert "unavailable" in found[2].text


@pytest.mark.parametrize(
    ("kind", "content", "told"),
    [
        ("bash_code_execution_tool_result", {"stdout": "42", "return_code": 0}, "42"),
        ("mcp_tool_result", [text("SUNNY")], "SUNNY"),
        ("web_fetch_tool_result", {"content": {"source": {"type": "text", "data": "A"}}}, '"A"'),
        ("web_fetch_tool_result", {"source": {"type": "base64", "data": "AAAA"}}, "[file omitted]"),
    ],
)
def test_results_of_a_servers_tools_are_told(kind: str, content: Any, told: str) -> None:
    call = {**SEARCH, "type": "mcp_tool_use" if kind.startswith("mcp") else SEARCH["type"]}
    said = {"role": "assistant", "content": [call, found_by("s1", content, kind)]}
    found = meant([*HI, said])
    assert found.messages[-1].role is Role.TOOL and told in found.messages[-1].text
    assert found.add_generation_prompt


def test_null_fields_of_blocks_are_as_absent() -> None:
    thought = {"type": "thinking", "thinking": None, "signature": None}
    said = {"role": "assistant", "content": [thought, text("ok", citations=None)]}
    assert meant([*HI, said, *HI]).messages[1] == Message(Role.ASSISTANT, "ok")


def test_a14_prefill_and_its_edges() -> None:
    said = {"role": "assistant", "content": "The "}
    open_turn = meant([*HI, said])
    assert open_turn.continue_final
    assert not open_turn.add_generation_prompt
    for empty in ("", [], [{"type": "thinking", "thinking": "x", "signature": ""}]):
        assert meant([*HI, {"role": "assistant", "content": empty}]) == meant(HI)
    schema = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    shaped = meant([*HI, said], output_config=schema)
    assert [m.role for m in shaped.messages] == [Role.USER, Role.SYSTEM, Role.ASSISTANT]
    assert shaped.continue_final
    after = meant([*HI, said, {"role": "system", "content": "late"}])
    assert after.add_generation_prompt


def test_a20_deferred_tools_are_described_where_they_were_found() -> None:
    found_tools = result([{"type": "tool_reference", "tool_name": "WebFetch"}])
    found = meant([*HI, user(found_tools)], tools=[WEATHER, FETCH])
    assert [(tool.name, tool.is_deferred) for tool in found.tools] == [
        ("weather", False),
        ("WebFetch", True),
    ]
    assert found.messages[-1].text == (
        '<functions>\n<function>{"description": "Gets a page.", "name": "WebFetch", '
        '"parameters": {"type": "object"}}</function>\n</functions>'
    )
    before = meant(HI, tools=[WEATHER])
    assert found.messages[0] == before.messages[0]


def test_a21_tools_come_and_go_in_words() -> None:
    definition = {**WEATHER, "name": "tide"}
    added = [
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": definition}},
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "WebFetch"}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "weather"}},
        {"type": "tool_addition", "tool": {"type": "mcp_toolset_reference", "server_name": "s"}},
    ]
    found = meant([*HI, {"role": "system", "content": added}], tools=[WEATHER, FETCH])
    assert [tool.name for tool in found.tools if tool.is_deferred] == ["WebFetch", "tide"]
    text = found.messages[-1].text
    assert text.index('"name": "tide"') < text.index('"name": "WebFetch"')
    assert text.endswith("The tool weather is no longer available.")


class Name(str):
    """Counts how often it was looked up."""

    n_hashed = 0

    def __hash__(self) -> int:
        Name.n_hashed += 1
        return super().__hash__()


def test_many_tools_are_looked_up_by_name_once_for_all() -> None:
    n = 200
    added = [{"type": "tool_addition", "tool": {"name": "t1"}}] * n
    found = user(*[result([{"type": "tool_reference", "tool_name": "t2"}])] * n)
    body = MessagesBody(
        messages=[
            MessageParam("user", "hi"),
            MessageParam("system", added),
            MessageParam("user", found["content"]),
        ],
        tools=[ToolParam(name=Name(f"t{i}")) for i in range(n)],
    )
    assert len(conversation(body).messages) == n + 2
    assert Name.n_hashed < 5 * n


def test_references_do_not_multiply_a_long_definition_without_end() -> None:
    long = {"name": "long", "description": "x" * 100_000, "defer_loading": True}
    found = result([{"type": "tool_reference", "tool_name": "long"}] * 100)
    assert len(meant([user(found)], tools=[long]).messages[0].text) > 10_000_000
    with pytest.raises(BadRequest, match="refer to fewer"):
        meant([user(found), user(found)], tools=[long])
    added = {"type": "tool_addition", "tool": {"name": "long"}}
    with pytest.raises(BadRequest, match="refer to fewer"):
        meant([*HI, {"role": "system", "content": [added] * 200}], tools=[long])


def test_server_tools_are_left_out() -> None:
    foreign = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "mcp_toolset", "mcp_server_name": "s"},
        {**WEATHER, "type": "custom", "strict": True, "input_examples": [{}]},
        {"name": "bare"},
    ]
    assert [tool.name for tool in meant(HI, tools=foreign).tools] == ["weather", "bare"]


def test_b19_images_are_refused_when_new_and_omitted_when_old() -> None:
    with pytest.raises(BadRequest, match="image input is not supported") as refused:
        meant([*HI, user(text("see"), IMAGE)])
    assert refused.value.param == "messages[1].content[1]"
    with pytest.raises(BadRequest, match="image input"):
        meant([user(IMAGE), {"role": "system", "content": "late"}])
    old = meant([user(IMAGE, text("see")), {"role": "assistant", "content": "a"}, *HI])
    assert old.messages[0].text == "[image omitted]\nsee"
    shown = meant([*HI, user(result([text("a"), IMAGE]))])
    assert shown.messages[-1].text == "a\n[image omitted]"


def test_documents_and_search_results_are_read() -> None:
    plain = {"type": "text", "media_type": "text/plain", "data": "inside"}
    parts = {"type": "content", "content": [text("one"), text("two")]}
    found = meant(
        [
            user(
                {"type": "document", "source": plain, "title": "T", "context": "C"},
                {"type": "document", "source": parts},
                {"type": "search_result", "source": "s", "title": "t", "content": [text("x")]},
            )
        ]
    )
    assert found.messages[0].text == "T\nC\ninside\none\ntwo\nt\ns\nx"
    paper = {"type": "document", "source": {"type": "base64", "data": "AA=="}}
    for unread in (paper, {"type": "container_upload", "file_id": "f"}):
        with pytest.raises(BadRequest, match="document input is not supported"):
            meant([user(unread)])
        old = meant([user(unread), {"role": "assistant", "content": "a"}, *HI])
        assert old.messages[0].text == "[document omitted]"


def test_x6_unknown_blocks_give_their_text_or_their_json() -> None:
    odd = [
        {"type": "compaction", "content": "summary"},
        {"type": "from_the_future", "text": "hello"},
        {"type": "from_the_future", "what": [1], "encrypted_content": "gAAAA"},
        {"type": "from_the_future"},
    ]
    shown = 'summary\nhello\n{"type": "from_the_future", "what": [1]}'
    assert meant([user(*odd)]).messages == (Message(Role.USER, shown),)
    said = {"role": "assistant", "content": [odd[2], IMAGE]}
    (_, answer, _) = meant([*HI, said, *HI]).messages
    assert answer.text == '{"type": "from_the_future", "what": [1]}[image omitted]'
    assert meant([user()]).messages == (Message(Role.USER),)


USE: dict[str, Any] = {"type": "tool_use", "id": "c1", "name": "act", "input": {}}
MISPLACED: list[tuple[str, dict[str, Any]]] = [
    ("user", USE),
    ("user", {"type": "thinking", "thinking": "Hm."}),
    ("user", {"type": "tool_reference", "tool_name": "act"}),
    ("assistant", {"type": "tool_result", "tool_use_id": "c1", "content": "x"}),
    ("assistant", {"type": "tool_removal", "tool": {"name": "act"}}),
    ("system", USE),
]


@pytest.mark.parametrize(("role", "block"), MISPLACED)
def test_a_block_in_a_message_of_another_role_is_refused(role: str, block: dict[str, Any]) -> None:
    """It has no text there, and would vanish."""
    with pytest.raises(BadRequest, match=f"{block['type']} cannot stand") as refused:
        meant([*HI, {"role": role, "content": [{"type": "text", "text": "a"}, block]}, *HI])
    assert refused.value.param == "messages[1].content[1]"


def test_blocks_without_text_in_a_result_are_shown_as_json() -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [{"type": "text", "text": "a"}, {**USE, "input": {"b": 1}}],
    }
    messages = meant([*HI, {"role": "assistant", "content": [USE]}, user(result)]).messages
    assert '"input": {"b": 1}' in messages[-1].text


def test_a_result_of_a_servers_tool_is_read_from_a_user_too() -> None:
    block = {"type": "web_search_tool_result", "tool_use_id": "c1", "content": ["PEAR"]}
    (_, _, result) = meant([*HI, {"role": "assistant", "content": [USE]}, user(block)]).messages
    assert (result.role, result.text) == (Role.TOOL, '["PEAR"]')


def test_a_system_message_may_have_settings_only() -> None:
    """An effort from here on, which stays in the history of the client."""
    late: Any = {"role": "system", "output_config": {"effort": "low"}}
    assert meant([*HI, late]).messages == meant(HI).messages


def test_what_anthropics_servers_would_remember_is_refused() -> None:
    going_on = {"type": "continue", "previous_message_id": "msg_1"}
    for field, asked in (("thread", going_on), ("compaction", {"type": "summarize"})):
        with pytest.raises(BadRequest, match="send all messages") as refused:
            meant(HI, **{field: asked})
        assert refused.value.param == field


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, None),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "adaptive", "display": "omitted"}, True),
        ({"type": "between_tools"}, True),
        ({"type": "disabled"}, False),
        ({"type": "unheard-of"}, None),
    ],
)
def test_thinking(thinking: Any, expected: bool | None) -> None:
    assert meant(HI, thinking=thinking).thinking is expected


def test_effort_reaches_the_template_in_its_own_levels() -> None:
    for sent, expected in (("low", "low"), ("high", "high"), ("xhigh", "high"), ("max", "high")):
        assert meant(HI, output_config={"effort": sent}).template == {"reasoning_effort": expected}
    assert meant(HI, output_config={"effort": "odd"}).template == {}


def test_a_wish_for_json_becomes_the_last_instruction() -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object", "title": "Deep Thought"}}
    new = meant(HI, output_config={"format": wanted})
    old = meant(HI, output_format=wanted)
    assert new == old
    assert new.messages[-1].role is Role.SYSTEM
    assert "Deep Thought" in new.messages[-1].text


@pytest.mark.parametrize(
    "turn", [{"role": "assistant", "content": ""}, {"role": "system", "content": []}]
)
def test_nothing_said_is_an_empty_turn_of_the_user(turn: Any) -> None:
    assert meant([turn]).messages == (Message(Role.USER),)


WORD = st.text(max_size=3)
FIELDS = ("text", "thinking", "id", "name", "tool_use_id", "tool_name", "title", "context")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | WORD,
    lambda deeper: st.lists(deeper, max_size=2) | st.dictionaries(WORD, deeper, max_size=2),
    max_leaves=4,
)
BLOCKS = st.recursive(
    st.fixed_dictionaries(
        {"type": st.sampled_from([*sorted(KINDS), "odd"])},
        optional={
            **dict.fromkeys(FIELDS, WORD | VALUES),
            **dict.fromkeys(("source", "input", "tool", "definition", "is_error"), VALUES),
        },
    ),
    lambda deeper: st.builds(
        lambda block, content: {**block, "content": content},
        deeper,
        st.lists(deeper, max_size=2) | VALUES,
    ),
    max_leaves=6,
)
TURNS = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant", "system"]),
    WORD | st.lists(BLOCKS, max_size=3),
)


@given(st.lists(TURNS, min_size=1, max_size=3), WORD | st.lists(BLOCKS, max_size=2))
def test_x6_whatever_is_sent_is_understood_or_refused_with_its_path(
    turns: Any, system: Any
) -> None:
    try:
        assert meant(turns, system=system).messages
    except BadRequest as refused:
        assert refused.param is not None
        assert refused.message.startswith(refused.param)
