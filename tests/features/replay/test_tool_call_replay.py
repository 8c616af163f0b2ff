"""Sampled calls in later prompts: the same tokens, inside their own turn, for their own client."""

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxstack.core.conversation import Conversation, Message, Role, Tool, ToolCall
from mlxstack.core.engine_events import FinishReason, RequestFinished, RequestTimings, TokenSampled
from mlxstack.core.request import Caller, Request
from mlxstack.core.response_parts import CallBlock, ContentPart, ReasoningPart, ToolCallPart
from mlxstack.features.formats.answer_format import ModelAnswerFormat
from mlxstack.features.replay.answer_replay import CALL_BYTES, ToolCallReplay
from mlxstack.service.calls.generation import Generation, assistant_message
from mlxstack.service.parts.generation_options import GenerationOptions
from mlxstack.text.assembly import assemble_text
from mlxstack.text.prompt.splicer import NAMELESS, Scope
from mlxstack.text.tokens.cached_tokenizer import Prompt
from tests.features.formats.formats import FORMATS, respelled, tokenizer_of

SYSTEM = Role.SYSTEM
USER = Role.USER
ASSISTANT = Role.ASSISTANT
TOOL = Role.TOOL
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}},
}
TOOLS = (Tool("read_file", "Read a file.", SCHEMA), Tool("bash", "Run a command.", SCHEMA))
JSON_CALL = '<tool_call>{"name":"read_file","arguments":{"path":"a.py"}}</tool_call>'
MARKS = sorted(
    {mark for one in FORMATS.values() for mark in (*one.special, *one.added, one.reminder)}
)
# The sign at the beginning keeps the search for the ends of turns out of the calls.
PROSE = st.lists(
    st.sampled_from([*MARKS, "<|im_end|>", "read_file", "a.py", "Why?", " ", "\n", "é"]), max_size=6
).map(lambda parts: "§" + "".join(parts))
ARGUMENTS = st.fixed_dictionaries(
    {"path": st.text("abc é/.日", min_size=1, max_size=8).map(lambda t: f"x{t}y")},
    optional={"limit": st.integers(0, 99)},
)
CALLS = st.lists(st.tuples(st.sampled_from(["read_file", "bash"]), ARGUMENTS), max_size=3)


class Chat:
    """One conversation with a model of one format, with a replay and without."""

    def __init__(self, name: str) -> None:
        self.tokenizer = tokenizer_of(name)
        self.prompt_maker = assemble_text(self.tokenizer).prompt_maker
        self.bare = assemble_text(self.tokenizer).prompt_maker
        self.voice = ModelAnswerFormat(self.tokenizer)
        self.is_single = name == "channels"

    def heard(self, prompt: Prompt, tokens: list[int], scope: Scope = NAMELESS) -> Message:
        """What a client gets for an answer of these tokens."""
        eos = frozenset(self.tokenizer.eos_token_ids)
        salt, name = scope
        ask = Request(
            "a", prompt, 9999, eos=eos, caller=Caller(salt=salt), display_name=name or None
        )
        # Answers are not remembered: their prompts would hide those of the calls alone.
        memory = SimpleNamespace(
            remember_calls=self.prompt_maker.remember_calls, remember_answer=lambda *_: None
        )
        text_processor: Any = SimpleNamespace(output_format=self.voice, prompt_maker=memory)
        generation = Generation(ask, GenerationOptions("a"), prompt, text_processor, talk_of())
        events = [*(TokenSampled("a", token) for token in [*tokens, min(eos)])]
        parts = [part for event in events for part in generation.on_event(event)]
        parts += generation.on_event(RequestFinished("a", FinishReason.EOS, RequestTimings()))
        return assistant_message(
            p for p in parts if isinstance(p, ReasoningPart | ContentPart | ToolCallPart)
        )

    def written(self, talk: Conversation, answer: Message) -> str:
        """The answer as the template writes it, without what ends it."""
        before = self.bare.text(talk)
        after = self.bare.text(
            Conversation((*talk.messages, answer), tools=TOOLS, add_generation_prompt=False)
        )
        assert after.startswith(before)
        ending = self.tokenizer.eos_token if answer.tool_calls else "<|im_end|>"
        return after[len(before) :].removesuffix(ending)


def talk_of(*messages: Message) -> Conversation:
    return Conversation(messages, tools=TOOLS)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=12, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_a_prompt_differs_only_in_the_tokens_of_replayed_calls(name: str, data: Any) -> None:
    """The next prompt is the last one, the sampled answer, and what is new, to the token."""
    chat = Chat(name)
    random = Random(data.draw(st.integers(0, 99)))
    messages = [Message(SYSTEM, "Rules. " + data.draw(PROSE)), Message(USER, data.draw(PROSE))]
    for step in range(data.draw(st.integers(1, 3))):
        talk = talk_of(*messages)
        prompt = chat.prompt_maker.make(talk)
        made = data.draw(CALLS)[: 1 if chat.is_single else None]
        calls = tuple(
            ToolCall(f"functions.{function}:{step}{at}", function, arguments)
            for at, (function, arguments) in enumerate(made)
        )
        if not calls:
            break
        text = chat.written(talk, Message(ASSISTANT, tool_calls=calls))
        tokens = respelled(chat.tokenizer, text, lambda: random.choice([1, 1, 2, 5]))
        answer = chat.heard(prompt, tokens)
        assert [(c.name, c.arguments) for c in answer.tool_calls] == made
        results = [
            Message(TOOL, data.draw(PROSE), tool_call_id=call.id) for call in answer.tool_calls
        ]
        messages += [answer, *results]
        following, plain = (
            prompt_maker.make(talk_of(*messages)) for prompt_maker in (chat.prompt_maker, chat.bare)
        )
        assert following.text == plain.text
        cached = prompt.tokens + tuple(tokens)
        assert following.tokens[: len(cached)] == cached
        rest = following.tokens[len(cached) :]
        assert rest == plain.tokens[len(plain.tokens) - len(rest) :]
        assert plain.text is not None
        assert chat.prompt_maker.detokenize(rest) == plain.text[len(f"{prompt.text}{text}") :]
        assert [
            chat.prompt_maker.detokenize(following.tokens[:cut])
            for cut in following.checkpoint_positions
        ] == [
            chat.prompt_maker.detokenize(plain.tokens[:cut]) for cut in plain.checkpoint_positions
        ]


def remembered(chat: Chat, text: str, scope: Scope = NAMELESS) -> Message:
    """The answer that a client gets for this text; its calls are remembered."""
    prompt = chat.bare.make(talk_of(Message(USER, "u")))
    tokens = chat.tokenizer.encode(text, add_special_tokens=False)
    return chat.heard(prompt, tokens, scope)


def is_replayed(chat: Chat, answer: Message, scope: Scope = NAMELESS) -> bool:
    """Whether a prompt with this answer has other tokens than without a replay."""
    talk = talk_of(Message(USER, "u"), answer, Message(USER, "v"))
    return chat.prompt_maker.make(talk, scope).tokens != chat.bare.make(talk).tokens


def with_arguments(answer: Message, arguments: dict[str, Any]) -> Message:
    (call,) = answer.tool_calls
    return Message(ASSISTANT, answer.text, tool_calls=(ToolCall(call.id, call.name, arguments),))


def test_marks_that_an_assistant_only_mentions_are_no_call() -> None:
    chat = Chat("json")
    answer = remembered(chat, JSON_CALL)
    quoted = Message(ASSISTANT, f"I close with <tool_call></tool_call>, as in {JSON_CALL}")
    before = (Message(USER, JSON_CALL), quoted, Message(USER, "Do it."))
    new, old = (m.make(talk_of(*before, answer)) for m in (chat.prompt_maker, chat.bare))
    n = len(chat.bare.make(talk_of(*before)).tokens)
    assert new.tokens[:n] == old.tokens[:n]
    sampled = tuple(chat.tokenizer.encode(JSON_CALL, add_special_tokens=False))
    assert new.tokens[n : n + len(sampled)] == sampled


@pytest.mark.parametrize(
    ("sampled", "returned", "replays"),
    [
        ({"path": "a"}, {"path": "a"}, True),
        ({"path": "a"}, {"path": "b"}, False),
        ({"path": "a"}, {"path": "a", "limit": 1}, False),
        ({"limit": 1}, {"limit": 1.0}, False),
        ({"limit": 1}, {"limit": True}, False),
        ({"path": "a", "limit": 1}, {"limit": 1, "path": "a"}, True),
    ],
)
def test_only_an_equal_call_is_replayed(sampled: Any, returned: Any, replays: bool) -> None:
    chat = Chat("json")
    said = str(sampled).replace("'", '"').replace(": ", ":")
    answer = remembered(chat, f'<tool_call>{{"name":"bash","arguments":{said}}}</tool_call>')
    assert is_replayed(chat, with_arguments(answer, returned)) is replays


@pytest.mark.parametrize(
    "sampled",
    [
        '{"name":"bash","arguments":{"path":"a","path":"obey me"}}',
        '{"name":"bash","arguments":{"path":"a","path":"a"}}',
        '{"name":"bash","note":"obey me","arguments":{"path":"a"}}',
        '{"id":"call_1","name":"bash","arguments":{"path":"a"}}',
    ],
)
def test_words_that_the_call_does_not_mean_are_not_replayed(sampled: str) -> None:
    chat = Chat("json")
    answer = remembered(chat, f"<tool_call>{sampled}</tool_call>")
    assert answer.tool_calls[0].arguments == {"path": "a"}
    assert not is_replayed(chat, answer)


def test_a_sampled_special_token_opens_no_turn() -> None:
    chat = Chat("json")
    for inside in ('{"name":"bash","arguments":{"path":"<|im_start|>"}}', JSON_CALL[11:-12]):
        spelled = chat.tokenizer.encode(inside, add_special_tokens=False)
        mark = chat.tokenizer.encode("<tool_call><|im_start|></tool_call>")
        for tokens in ([mark[0], *spelled, mark[2]], [mark[0], mark[1], *spelled, mark[2]]):
            answer = chat.heard(chat.bare.make(talk_of(Message(USER, "u"))), tokens)
            talk = talk_of(Message(USER, "u"), answer)
            n = chat.bare.make(talk).tokens.count(mark[1])
            assert chat.prompt_maker.make(talk).tokens.count(mark[1]) == n


def test_redteam_8_a_call_stays_with_its_tenant_and_conversation() -> None:
    chat = Chat("section")
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0"
        '<|tool_call_argument_begin|>{"path":"a"}<|tool_call_end|><|tool_calls_section_end|>'
    )
    own = ("tenant", "chat-1")
    answer = remembered(chat, text, own)
    assert answer.tool_calls == (ToolCall("functions.bash:0", "bash", {"path": "a"}),)
    assert is_replayed(chat, answer, own)
    for other in (("", "chat-1"), ("tenant", "chat-2"), ("other", "chat-1")):
        assert not is_replayed(chat, answer, other)


def test_a_prompt_that_a_sentinel_would_change_is_left_alone() -> None:
    """The template drops the user's text for names that it does not know.

    Without that text, the call lies where the user quotes it.
    """
    chat = Chat("letters")
    template = chat.tokenizer.chat_template
    text = """'user\\n' + m.content"""
    picky = "'user\\n' + (m.content if names in ('', 'bash') else '')"
    names = "{%- set names = messages | map(attribute='tool_calls', default=[]) | sum(start=[])"
    names += " | map(attribute='function.name') | join %}"
    body = template.replace("+ m.role + '\\n' + m.content", f"+ {text}")
    assert body != template
    call = '<function name="bash"><param name="path">ab</param></function>'
    prompt = chat.bare.make(talk_of(Message(USER, "u")))
    answer = chat.heard(prompt, respelled(chat.tokenizer, call, lambda: 1))
    opening = "<|im_end|><|im_start|>assistant\n"
    talk = Conversation((Message(USER, "x" * len(opening) + call), answer), tools=TOOLS)
    try:
        chat.tokenizer.chat_template = names + body.replace(text, picky)
        assert chat.prompt_maker.make(talk) == chat.bare.make(talk)
    finally:
        chat.tokenizer.chat_template = template
    assert chat.prompt_maker.make(talk).tokens != chat.bare.make(talk).tokens


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_every_format_are_replayed(name: str) -> None:
    chat = Chat(name)
    talk = talk_of(Message(USER, "u"))
    call = ToolCall("functions.bash:0", "bash", {"path": "a b"})
    text = chat.written(talk, Message(ASSISTANT, tool_calls=(call,)))
    tokens = respelled(chat.tokenizer, text, lambda: 1)
    prompt = chat.bare.make(talk)
    answer = chat.heard(prompt, tokens)
    cached = (*prompt.tokens, *tokens)
    following = talk_of(Message(USER, "u"), answer, Message(USER, "v"))
    assert chat.prompt_maker.make(following).tokens[: len(cached)] == cached
    assert chat.bare.make(following).tokens[: len(cached)] != cached


def test_a_call_that_the_end_of_the_answer_closed_is_replayed_without_a_mark() -> None:
    chat = Chat("json")
    answer = remembered(chat, JSON_CALL.removesuffix("</tool_call>"))
    talk = talk_of(Message(USER, "u"), answer)
    tokens = chat.prompt_maker.make(talk).tokens
    assert JSON_CALL in chat.prompt_maker.detokenize(tokens)


def test_blocks_take_a_bounded_room() -> None:
    replay = ToolCallReplay(max_bytes=10 * (CALL_BYTES + 400))
    calls = [ToolCall(f"c{at}", "bash", {"path": "x" * 999}) for at in range(30)]
    for call in calls:
        replay.remember(NAMELESS, CallBlock((call,), (7,) * 100, is_closed=True))
        replay.remember(NAMELESS, CallBlock((call,), (7,) * 100, is_closed=True))
    known = replay.known(NAMELESS, calls)
    assert sorted(known) == list(range(20, 30))
    assert replay.n_bytes == 10 * (CALL_BYTES + 400)


def test_calls_of_one_block_come_back_together_or_not_at_all() -> None:
    replay = ToolCallReplay()
    one = ToolCall("c1", "bash", {})
    two = ToolCall("c2", "bash", {})
    replay.remember(NAMELESS, CallBlock((one, two), (1, 2), is_closed=True))
    assert list(replay.known(NAMELESS, (one, two))) == [0]
    assert not replay.known(NAMELESS, (one,))
    assert not replay.known(NAMELESS, (two, one))


def test_arguments_too_deep_to_compare_are_not_kept() -> None:
    deep: Any = {}
    for _ in range(200_000):
        deep = {"a": deep}
    replay = ToolCallReplay()
    replay.remember(NAMELESS, CallBlock((ToolCall("c", "bash", deep),), (1,), is_closed=True))
    assert replay.n_bytes == 0


def counted(function: Callable[..., Any], counts: list[int]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        counts.append(1)
        return function(*args)

    return call


def test_a_long_loop_of_calls_is_rendered_twice_per_prompt(monkeypatch: Any) -> None:
    """Each new call costs one small rendering more, the old ones none."""
    chat = Chat("coder")
    messages = [Message(USER, "u")]
    renders: list[int] = []
    template = chat.prompt_maker.template
    monkeypatch.setattr(template, "_render", counted(template._render, renders))
    for at in range(20):
        inside = f"<function=bash>\n<parameter=path>\n{at}\n</parameter>\n</function>"
        answer = remembered(chat, f"<tool_call>\n{inside}\n</tool_call>")
        messages += [answer, Message(TOOL, "r", tool_call_id=answer.tool_calls[0].id)]
        renders.clear()
        chat.prompt_maker.make(talk_of(*messages))
        assert len(renders) <= 6
