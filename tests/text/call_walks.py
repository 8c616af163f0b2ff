"""Random walks through the grammars of calls: forced ones, and those of a free answer."""

from collections.abc import Iterable
from functools import cache
from random import Random
from typing import Any

import jsonschema

from mlxstack.core.conversation import Tool
from mlxstack.text.formats import ParsedMessage, read_answer
from mlxstack.text.grammar.compiler import GrammarCompiler
from mlxstack.text.grammar.constraint import ConstraintLayout, GrammarConstraint, GrammarState
from mlxstack.text.grammar.forced_tool_call import ForcedCalls, call_grammars
from mlxstack.text.output_format import OutputFormat
from tests.text.formats import FORMATS, made_tokenizer
from tests.text.invented import INVENTED
from tests.text.test_forced import parameters

ALL = {**FORMATS, **INVENTED}
WORDS = "So:\n"
MOST_TOKENS = 1500


class Walker:
    """One format with its tokenizer, and the grammars of random tools."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.output_format = OutputFormat(tokenizer)
        self._compiler = GrammarCompiler(tokenizer, len(tokenizer))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def forced(self, tools: tuple[Tool, ...], *, is_single: bool) -> GrammarState:
        """The state after the tokens that force a call."""
        marks = self.output_format.call_marks
        assert marks is not None
        rules = self._compiler.compile(call_grammars(ForcedCalls(tools, marks, is_single)), "tools")
        return GrammarConstraint(ConstraintLayout(len(self.tokenizer)), rules).start()

    def free(self, tools: tuple[Tool, ...], **layout: Any) -> GrammarState:
        """The state at the beginning of a free answer."""
        made = self.output_format
        marks = made.free_call_marks
        assert marks is not None
        asked = call_grammars(ForcedCalls(tools, marks, is_single=False, is_complete=True))
        rules = self._compiler.compile(asked, "tools")
        calls = made.call_trigger(lambda: rules)
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
        return [at for at in range(len(self.tokenizer)) if mask[at // 8] >> at % 8 & 1]

    def walk(self, state: GrammarState, random: Random) -> str:
        """Random tokens up to the end of the grammar."""
        tokens: list[int] = []
        eos = self.output_format.eos
        while (allowed := self.allowed(state)) is not None:
            if eos & set(allowed):
                break
            assert allowed, self.tokenizer.decode(tokens)
            assert len(tokens) < MOST_TOKENS
            token = random.choice(allowed)
            state.advance(token)
            tokens.append(token)
        return str(self.tokenizer.decode(tokens))

    def read(self, text: str, tools: tuple[Tool, ...]) -> ParsedMessage:
        """The message that an answer means."""
        return read_answer(self.output_format.description, text, tools)


@cache
def walker_of(name: str) -> Walker:
    """The walker of a format."""
    return Walker(made_tokenizer(ALL[name]))


def tools_of(random: Random) -> tuple[Tool, ...]:
    """Two tools with random parameters."""
    return tuple(Tool(one, "", parameters(random, is_flat=False)) for one in ("greet", "visit"))


def check_forced(name: str, seeds: Iterable[int]) -> None:
    """A forced call of every random schema is read back, and its arguments are valid."""
    walker = walker_of(name)
    for seed in seeds:
        random = Random(f"{name} {seed}")
        tools = tools_of(random)
        text = walker.walk(walker.forced(tools, is_single=True), random)
        check_calls(walker.read(walker.output_format.forced_opening + text, tools), tools, "")


def check_free(name: str, seeds: Iterable[int]) -> None:
    """The same for a call that a free answer begins, after words that nothing constrains."""
    walker = walker_of(name)
    marks = walker.output_format.free_call_marks
    assert marks is not None
    words = "" if walker.output_format.has_headers else WORDS
    for seed in seeds:
        random = Random(f"{name} {seed}")
        tools = tools_of(random)
        state = walker.free(tools)
        for token in walker.encode(words + marks.forced):
            assert walker.allowed(state) is None and not state.is_ruled
            state.advance(token)
        assert state.is_ruled
        text = walker.walk(state, random)
        check_calls(walker.read(words + marks.forced + text, tools), tools, words.strip())


def check_calls(read: ParsedMessage, tools: tuple[Tool, ...], content: str) -> None:
    """Nothing but valid calls beside the content."""
    assert (read.content, read.reasoning_content, read.n_unparsed) == (content, "", 0)
    assert read.tool_calls
    for call in read.tool_calls:
        (tool,) = (one for one in tools if one.name == call.name)
        jsonschema.validate(call.arguments, tool.parameters)


def check_all(n_schemas: int) -> int:
    """Every format with this many schemas, forced and free; the number of calls."""
    for name in ALL:
        check_forced(name, range(n_schemas))
        check_free(name, range(n_schemas))
    return 2 * n_schemas * len(ALL)
