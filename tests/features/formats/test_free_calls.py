"""Calls in a free answer follow the grammar of the tools; text costs nothing, none forbids them."""

from random import Random
from typing import Any

import pytest
from msgspec import structs

from mlxstack.core.conversation import Conversation, Message, Role, Tool, ToolCall
from mlxstack.core.preset import ModelSpec, Preset, StructuredOutputSpec
from mlxstack.features.formats.grammar.constraint import ConstraintLayout, GrammarConstraint
from mlxstack.features.formats.grammar.forced_tool_call import ForcedCalls, call_grammar
from mlxstack.features.formats.syntax import first_mark
from mlxstack.service.parts.generation_options import GenerationOptions, ToolChoiceMode
from mlxstack.service.parts.text_assembly import assemble_text_processor
from mlxstack.text.grammar.compiler import GrammarCompiler
from tests.features.formats.call_walks import (
    ALL,
    EVERY,
    WORDS,
    check_forced,
    check_free,
    check_none,
    openings,
    tools_of,
    walker_of,
)
from tests.features.formats.test_derived_formats import ANSWERS, TOOLS, message, said

N_SCHEMAS = 1
WRITTEN_BY_TEMPLATES = pytest.mark.parametrize("name", ALL)
# A grammar quotes texts and nothing else, as models do; these templates write all values alike.
ALIKE = ("unquoted", "all quoted")
AS_GRAMMARS = pytest.mark.parametrize("name", [name for name in ALL if name not in ALIKE])
# A message of a channel has one call; the model of this format quotes text inside lists too.
UNLIKE = {("channels", "two"), ("quoted", "types"), ("prefixed", "types"), ("unprefixed", "types")}
WRITTEN = [name for name in ANSWERS if name != "marks"]


def is_allowed(mask: bytes | None, token: int) -> bool:
    return mask is None or bool(mask[token // 8] >> token % 8 & 1)


@pytest.mark.parametrize("name", EVERY)
def test_calls_of_any_schema_are_valid_and_none_is_none(name: str) -> None:
    for check in (check_forced, check_free, check_none):
        check(name, range(N_SCHEMAS))


@AS_GRAMMARS
def test_a_call_as_the_template_writes_it_is_free_to_come(name: str) -> None:
    walker = walker_of(name)
    for answer in WRITTEN:
        if (name, answer) in UNLIKE:
            continue
        calls = message(answer).tool_calls
        if name == "section":
            # The id of such a call has its name in it.
            ids = (f"functions.{call.name}:{at}" for at, call in enumerate(calls))
            calls = tuple(
                structs.replace(call, id=one) for call, one in zip(calls, ids, strict=True)
            )
        if name == "quoted":
            # The templates of this format sort the arguments.
            calls = tuple(
                structs.replace(call, arguments=dict(sorted(call.arguments.items())))
                for call in calls
                if isinstance(call.arguments, dict)
            )
        state = walker.free(TOOLS)
        n_ruled = 0
        written = said(walker.tokenizer, Message(Role.ASSISTANT, "", tool_calls=calls))
        for token in walker.encode(written):
            mask = state.mask()
            assert is_allowed(mask, token), (answer, walker.tokenizer.decode([token]))
            n_ruled += state.is_ruled
            state.advance(token)
        assert n_ruled and not state.is_ruled


@WRITTEN_BY_TEMPLATES
def test_taken_back_tokens_leave_no_trace(name: str) -> None:
    walker = walker_of(name)
    random = Random(name)
    tools = tools_of(name, random)
    one = walker.free(tools)
    other = walker.free(tools)
    script = walker.encode(f"{WORDS}{openings(walker, tools[0])[0]}")
    for _ in range(40):
        position = one.position()
        for _ in range(random.randrange(5)):
            allowed = walker.allowed(one)
            one.advance(random.choice([*script, 5] if allowed is None else allowed))
        one.rewind(position)
        assert one.mask() == other.mask()
        assert (one.is_ruled, one.forced_tokens()) == (other.is_ruled, other.forced_tokens())
        allowed = walker.allowed(one)
        if allowed is None and not script:
            break
        token = script.pop(0) if allowed is None else random.choice(allowed)
        one.advance(token)
        other.advance(token)


@WRITTEN_BY_TEMPLATES
def test_none_lets_no_mark_of_a_call_be_completed(name: str) -> None:
    made = walker_of(name).output_format
    walker = walker_of(name)
    assert made.description.calls is not None
    layout = ConstraintLayout(len(walker.tokenizer), made.eos, forbidden=made.call_sequences)
    marks = {made.forced_opening}
    if made.description.channels is None:
        marks = made.description.calls.trigger_marks
        if first_mark(made.trigger_mark) in marks:
            # Where sections of other kinds begin with the same mark, more is needed.
            marks = marks - {first_mark(made.trigger_mark)} | {made.forced_opening}
    for mark in marks:
        *tokens, last = walker.encode(mark)
        state = GrammarConstraint(layout).start()
        is_open = not tokens and last in made.call_tokens
        for token in [*tokens, last]:
            is_open = is_open or not is_allowed(state.mask(), token)
            state.advance(token)
        assert is_open, mark


ODD = Tool("take", "", {"type": "object", "properties": {"a <b": {}}, "required": ["a <b"]})
HELD = Tool(
    "greet", "", {"type": "object", "properties": {"who": {"enum": ["Ada"]}}, "required": ["who"]}
)


@AS_GRAMMARS
def test_a_tool_without_words_leaves_the_others_held(name: str) -> None:
    """Its own call is free after its name; one of another tool follows its schema."""
    walker = walker_of(name)
    tools = (HELD, ODD)
    for tool, arguments in ((HELD, {"who": "Ada"}), (ODD, {"a <b": 1}), (HELD, {"who": "Bob"})):
        state = walker.free(tools)
        is_allowed_throughout = True
        n_ruled = 0
        call_id = f"functions.{tool.name}:0" if name == "section" else "callid001"
        one = ToolCall(call_id, tool.name, arguments)
        answer = Message(Role.ASSISTANT, "", None, (one,))
        for token in walker.encode(said(walker.tokenizer, answer)):
            is_allowed_throughout &= is_allowed(state.mask(), token)
            n_ruled += state.is_ruled
            state.advance(token)
        assert n_ruled
        assert is_allowed_throughout is (arguments != {"who": "Bob"}), (tool.name, arguments)


def test_a_mark_in_a_thought_is_only_quoted() -> None:
    walker = walker_of("runes")
    made = walker.output_format
    state = walker.free(TOOLS, is_in_thinking=True)
    for token in walker.encode("I may write <deeds> now."):
        assert walker.allowed(state) is None
        state.advance(token)
    for token in [*made.answer_tokens, *walker.encode("<deeds>")]:
        assert walker.allowed(state) is None
        state.advance(token)
    assert state.is_ruled


def ruled_after(name: str, text: str, **layout: Any) -> bool:
    """Whether a grammar rules after this text."""
    walker = walker_of(name)
    state = walker.free(TOOLS, before=tuple(walker.encode(walker.header)), **layout)
    for token in walker.encode(text):
        assert not state.is_ruled
        state.advance(token)
    return state.is_ruled


NAME = TOOLS[0].name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        # An object with a name may be the answer itself.
        ("bare_json", '{"name": "'),
        ("bare_json", '{"name": "Ulm", "parameters": '),
        ("bare_json", f'So: {{"name": "{NAME}", "parameters": '),
        ("functionary", f"all\nSee {NAME}\n"),
        ("functionary", "all\n"),
        ("harmony", f"<|channel|>final<|message|> to=functions.{NAME}"),
    ],
)
def test_text_that_may_be_no_call_is_free(name: str, text: str) -> None:
    assert not ruled_after(name, text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bare_json", f'\n{{"name": "{NAME}", "parameters": '),
        ("functionary", f"all\nSo:>>>{NAME}\n"),
        ("harmony", "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions."),
        ("kimi_k2", "So: <|tool_call_begin|>"),
    ],
)
def test_a_call_is_held_from_its_unambiguous_opening(name: str, text: str) -> None:
    assert ruled_after(name, text)


async def constraint_of(
    tokenizer: Any, tools: tuple[Tool, ...], *, is_guided: bool = True, **more: Any
) -> Any:
    output = StructuredOutputSpec(auto_tool_grammar=is_guided)
    preset = Preset(model=ModelSpec(id="tiny"), structured_output=output)
    text_processor = assemble_text_processor(tokenizer, preset, len(tokenizer))
    conversation = Conversation((Message(Role.USER, "go"),), tools=tools, thinking=False)
    options = GenerationOptions("a-1", **more)
    prompt = await text_processor.prompt(conversation)
    constraint = await text_processor.constraints.of_answer(options, conversation, prompt)
    return constraint.grammar


async def test_a_request_with_tools_has_their_grammar(chatml: Any) -> None:
    found = await constraint_of(chatml, TOOLS)
    assert not found.has_grammar
    state = found.start()
    text = '<tool_call>\n{"name": "'
    for token in chatml.encode(text, add_special_tokens=False):
        state.advance(token)
    assert chatml.decode(state.forced_tokens()) == ""
    allowed = state.mask()
    first = {chatml.decode([at])[:1] for at in range(len(chatml)) if allowed[at // 8] >> at % 8 & 1}
    assert first == {"e", "n"}


async def test_a_request_without_calls_has_no_grammar(chatml: Any) -> None:
    assert await constraint_of(chatml, ()) is None
    assert await constraint_of(chatml, TOOLS, is_guided=False) is None
    forbidden = await constraint_of(chatml, TOOLS, tool_choice=ToolChoiceMode.NONE)
    assert forbidden is None or forbidden.start().mask() is None


async def test_a_call_is_required_where_only_the_prompt_opens_its_header() -> None:
    tokenizer = walker_of("functionary").tokenizer
    text_processor = assemble_text_processor(
        tokenizer, Preset(model=ModelSpec(id="tiny")), len(tokenizer)
    )
    conversation = Conversation((Message(Role.USER, "go"),), tools=TOOLS)
    prompt = await text_processor.prompt(conversation)
    options = GenerationOptions("a-1", tool_choice=ToolChoiceMode.REQUIRED)
    constraint = await text_processor.constraints.of_answer(options, conversation, prompt)
    assert constraint.opening == () and constraint.has_end and not constraint.has_format


def test_a_brace_is_no_mark_of_a_call() -> None:
    made = walker_of("bare_json").output_format
    assert made.call_tokens and not made.mark_tokens


@pytest.mark.parametrize(
    ("name", "unenforced"), [("coder", set()), ("gemma4", {"minLength", "maxLength"})]
)
def test_long_texts_compile_and_what_is_not_counted_is_named(
    name: str, unenforced: set[str]
) -> None:
    walker = walker_of(name)
    bounded = {"type": "string", "minLength": 200, "maxLength": 500_000}
    tool = Tool("f", "", {"type": "object", "properties": {"x": bounded}})
    grammar = call_grammar(
        ForcedCalls((tool,), walker.output_format.free_call_marks[0], is_single=True)
    )
    assert grammar.unenforced == unenforced
    assert GrammarCompiler(walker.tokenizer, len(walker.tokenizer)).compile(grammar.text, "tools")
