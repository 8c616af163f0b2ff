"""Random walks through the grammars of calls: forced ones, and those of a free answer."""

from collections.abc import Iterable
from functools import cache, partial
from random import Random
from typing import Any

import jsonschema
from llguidance import LLMatcher

from mlxstack.core.conversation import Tool
from mlxstack.features.formats.answer_reader import read_answer
from mlxstack.features.formats.families import FAMILIES, Family
from mlxstack.features.formats.grammar.constraint import (
    ConstraintLayout,
    GrammarConstraint,
    GrammarState,
)
from mlxstack.features.formats.grammar.forced_tool_call import ForcedCalls, call_grammar
from mlxstack.features.formats.output_format import OutputFormat, named_opening
from mlxstack.features.formats.syntax import ParsedMessage, is_mark, pieces
from mlxstack.text.grammar.compiler import GrammarCompiler
from tests.features.formats.formats import FORMATS, SKELETON, Format, made_tokenizer
from tests.features.formats.invented import INVENTED, NESTED
from tests.features.formats.test_forced_tool_call import parameters, tokens_in

ALL = {**FORMATS, **INVENTED, **NESTED}
REGISTERED = {one.format.name: one for one in FAMILIES}
EVERY = (*ALL, *REGISTERED)
WORDS = "So:\n"
MAX_TOKENS = 1500


class Walker:
    """One format with its tokenizer, and the grammars of random tools."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.output_format = OutputFormat(tokenizer)
        self._compiler = GrammarCompiler(tokenizer, len(tokenizer))

    @property
    def header(self) -> str:
        """The text with which a prompt opens an answer."""
        channels = self.output_format.description.channels
        return "" if channels is None else channels.starts

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def forced(self, tools: tuple[Tool, ...], *, is_single: bool) -> GrammarState:
        """The state after the tokens that force a call."""
        marks = self.output_format.call_marks
        assert marks is not None
        rules = self._compiler.compile(
            call_grammar(ForcedCalls(tools, marks, is_single)).text, "tools"
        )
        return GrammarConstraint(ConstraintLayout(len(self.tokenizer)), rules).start()

    def free(self, tools: tuple[Tool, ...], **layout: Any) -> GrammarState:
        """The state at the beginning of a free answer."""
        made = self.output_format
        found = []
        for marks in made.free_call_marks:
            asked = ForcedCalls(tools, marks, is_single=False, is_complete=True)
            rules = self._compiler.compile(call_grammar(asked).text, "tools")
            found.append(partial(_same, rules))
        calls = made.call_trigger(found, tools)
        return GrammarConstraint(
            ConstraintLayout(
                len(self.tokenizer), made.eos, closes=made.answer_tokens, calls=calls, **layout
            )
        ).start()

    def allowed(self, state: GrammarState) -> list[int] | None:
        """The tokens that may come next; None for all."""
        mask = state.mask()
        if mask is None:
            return None
        return tokens_in(mask, len(self.tokenizer))

    def walk(self, state: GrammarState, random: Random) -> str:
        """Random tokens up to the end of the grammar."""
        tokens: list[int] = []
        eos = self.output_format.eos
        while (allowed := self.allowed(state)) is not None:
            if eos & set(allowed):
                break
            assert allowed, self.tokenizer.decode(tokens)
            assert len(tokens) < MAX_TOKENS
            token = random.choice(allowed)
            state.advance(token)
            tokens.append(token)
        return str(self.tokenizer.decode(tokens))

    def read(self, text: str, tools: tuple[Tool, ...]) -> ParsedMessage:
        """The message that an answer means."""
        return read_answer(self.output_format.description, text, tools)


def _same(rules: LLMatcher | None) -> LLMatcher | None:
    return rules


@cache
def walker_of(name: str) -> Walker:
    """The walker of a format, derived or registered."""
    if name in ALL:
        return Walker(made_tokenizer(ALL[name]))
    family = REGISTERED[name]
    walker = Walker(made_tokenizer(_form(family), _template(family)))
    assert walker.output_format.description.name == name
    return walker


def _form(family: Family) -> Format:
    """A format whose tokenizer has the marks of a family as special tokens."""
    found = [one for mark in family.format.marks for one in pieces(mark) if is_mark(one)]
    return Format("", special=tuple(dict.fromkeys(found)))


def _template(family: Family) -> str:
    """A template that writes no calls, and contains the texts by which a family is known."""
    said = "".join(family.contains).replace("'", "\\'")
    return "{%- set known = '" + said + "' %}" + SKELETON.replace("\nCALLS\n", "")


def tools_of(name: str, random: Random) -> tuple[Tool, ...]:
    """Two tools with random parameters, as far as the format has words for them."""
    is_flat = name == "function_gemma"
    return tuple(Tool(one, "", parameters(random, is_flat=is_flat)) for one in ("greet", "visit"))


def check_forced(name: str, seeds: Iterable[int]) -> None:
    """A forced call of every random schema is read back, and its arguments are valid."""
    walker = walker_of(name)
    for seed in seeds:
        random = Random(f"{name} {seed}")
        tools = tools_of(name, random)
        text = walker.walk(walker.forced(tools, is_single=True), random)
        check_calls(walker.read(walker.output_format.forced_opening + text, tools), tools, "")


def check_free(name: str, seeds: Iterable[int]) -> None:
    """The same for a call that a free answer begins, after words that nothing constrains."""
    walker = walker_of(name)
    channels = walker.output_format.description.channels
    expected = WORDS if channels is None else channels.call_head.format(name="greet")
    for seed in seeds:
        random = Random(f"{name} {seed}")
        tools = tools_of(name, random)
        for opening in openings(walker, tools[0]):
            is_first = opening.startswith("{")
            lead = " \n" if is_first else expected
            state = walker.free(tools, before=tuple(walker.encode(walker.header)))
            for token in walker.encode(lead + opening):
                assert walker.allowed(state) is None and not state.is_ruled, opening
                state.advance(token)
            assert state.is_ruled, opening
            text = walker.walk(state, random)
            content = expected.strip() if channels is None and not is_first else ""
            check_calls(walker.read(lead + opening + text, tools), tools, content)


def openings(walker: Walker, tool: Tool) -> list[str]:
    """The texts with which a call may begin, without the header that ends the prompt."""
    made = walker.output_format
    found = [marks.forced for marks in made.free_call_marks]
    if not made.trigger_mark:
        found = [named_opening(made.description, tool.name)]
    return [one.removeprefix(walker.header) for one in found]


def check_none(name: str, seeds: Iterable[int]) -> None:
    """No mark of a call is completed by an answer that wants to, and no call is read."""
    walker = walker_of(name)
    made = walker.output_format
    n_vocab = len(walker.tokenizer)
    banned = made.mark_tokens
    for seed in seeds:
        random = Random(f"{name} {seed}")
        tools = tools_of(name, random)
        call = walker.walk(walker.forced(tools, is_single=True), random)
        layout = ConstraintLayout(n_vocab, made.eos, forbidden=made.call_sequences)
        state = GrammarConstraint(layout).start()
        tokens = []
        for wanted in walker.encode(made.forced_opening + call):
            allowed = walker.allowed(state)
            free = [t for t in allowed or range(n_vocab) if t not in banned | made.special]
            is_free = wanted not in banned and (allowed is None or wanted in allowed)
            tokens.append(wanted if is_free else random.choice(free))
            state.advance(tokens[-1])
        marks = [*made.call_sequences, *((token,) for token in banned)]
        assert not marks or completes(walker.encode(made.forced_opening + call), marks)
        assert not completes(tokens, marks)
        read = walker.read(str(walker.tokenizer.decode(tokens)), ())
        assert (read.tool_calls, read.n_unparsed) == ((), 0)


def completes(tokens: list[int], sequences: list[tuple[int, ...]]) -> bool:
    """Whether one of the sequences is among the tokens."""
    return any(
        tuple(tokens[at : at + len(one)]) == one for one in sequences for at in range(len(tokens))
    )


def check_calls(read: ParsedMessage, tools: tuple[Tool, ...], content: str) -> None:
    """Nothing but valid calls beside the content."""
    assert (read.content, read.reasoning_content, read.n_unparsed) == (content, "", 0)
    assert read.tool_calls
    for call in read.tool_calls:
        (tool,) = (one for one in tools if one.name == call.name)
        jsonschema.validate(call.arguments, tool.parameters)


def check_all(n_schemas: int) -> int:
    """Every format with this many schemas: forced, auto and none; the number of answers."""
    for name in EVERY:
        for check in (check_forced, check_free, check_none):
            check(name, range(n_schemas))
    return 3 * n_schemas * len(EVERY)
