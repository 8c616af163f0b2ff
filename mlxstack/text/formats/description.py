"""Description of an output format: reasoning marks, call syntax, turn ends."""

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from msgspec import Struct

from mlxstack.core.conversation import ToolCall

NAME = "{name}"
ID = "{id}"
INDEX = "{index}"
ARGUMENTS = "{arguments}"
TYPE = "{type}"
KEY = "{key}"
COUNT = "{count}"
"""Slots among the literal parts of a written call."""

GEMMA_HEAD = "call:"
"""Text before the name of a call of Gemma."""

# A token before a tag belongs to it.
_PREFIX = r"(?:\]<\][^\s<>\[\]]+\[>\[)?"
_PIECE = re.compile(
    rf"{_PREFIX}<(?!\][^\s<>\[\]]+\[>\[)[^<>\s]*>?|\[[^\[\]\s]*\]?|(?:(?!\]<\])[^\s<\[])+|\]"
)
_MARK = re.compile(rf"{_PREFIX}<[^<>\s]+>|\[[^\[\]\s]+\]")


class FormatSource(StrEnum):
    """The origin of a description."""

    DERIVED = "derived"
    FAMILY = "family"
    MLX_LM = "mlx-lm"
    FALLBACK = "fallback"
    NONE = "none"


class ReasoningMarks(Struct, frozen=True):
    """Marks around a thought; `opens` is empty where none is needed.

    `prefix` are words of the prompt that a thought begins with.
    """

    opens: str
    closes: str
    prefix: str = ""


class JsonBody(Struct, frozen=True):
    """Call as JSON object: paths of name, arguments, id; or `is_list`.

    An empty path of the name: the name is the only key, and the arguments are its value.
    """

    parts: tuple[str, ...]
    name: tuple[str, ...]
    arguments: tuple[str, ...]
    id: tuple[str, ...] = ()
    is_list: bool = False
    list_opens: str = "["
    list_closes: str = "]"


class NamedBody(Struct, frozen=True):
    """A name between literal parts, then the arguments as a JSON object."""

    parts: tuple[str, ...]


class TaggedBody(Struct, frozen=True):
    """Name between literals, then a pair of tags per argument.

    `value_opens` stands between key and value and may hold `{type}`, whose words `types` gives
    by JSON type; `value_closes` may hold `{key}`. Text is written as it is, or as JSON if
    `has_json_text`: then `value_closes` may be empty, and `argument_opens` mere white space. With
    `item` objects are nested arguments, and lists are nested arguments of this name.
    """

    parts: tuple[str, ...]
    argument_opens: str
    value_opens: str
    value_closes: str
    types: tuple[tuple[str, str], ...] = ()
    has_json_text: bool = False
    item: str = ""


class PythonBody(Struct, frozen=True):
    """Python calls with keyword arguments, in a list or not.

    `has_bare_text`: text is written without quotes; `has_quoted_values`: all values have quotes.
    """

    is_list: bool = True
    has_bare_text: bool = False
    has_quoted_values: bool = False


class GemmaBody(Struct, frozen=True):
    """`call:name{key:value}`, with `quote` around text."""

    quote: str


class PublishedBody(Struct, frozen=True):
    """Section text that a parser of mlx-lm reads."""

    parser: Callable[[str, Any], Any]


CallBody = JsonBody | NamedBody | TaggedBody | PythonBody | GemmaBody | PublishedBody


class CallSyntax(Struct, frozen=True):
    """The syntax of tool calls.

    All calls of an answer stand between `section_opens` and `section_closes`, each between
    `opens` and `closes`, `between` two of them. Literals are kept as the template writes them;
    `opens` of a list may hold `{count}`, the number of its calls.
    """

    body: CallBody
    section_opens: str = ""
    section_closes: str = ""
    opens: str = ""
    closes: str = ""
    between: str = ""

    @property
    def is_bare(self) -> bool:
        """Whether no mark announces a call."""
        return not self.section_opens.strip() and not self.opens.strip()


FALLBACK_CALLS = CallSyntax(
    JsonBody(
        parts=('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}"),
        name=("name",),
        arguments=("arguments",),
    ),
    opens="<tool_call>\n",
    closes="\n</tool_call>",
    between="\n",
)
"""The calls of a template that writes none."""


class Channels(Struct, frozen=True):
    """Answer of several messages, each behind a header before `message`.

    `reasoning` and `call` are regular expressions of headers; `call` has a group `name`, and maybe
    `space`, without which only the name of an offered tool makes a call.
    `starts` opens a header after one of `ends`; `answer` is the header of a plain answer, and
    `call_head` that of a call, where the call itself stands in the message.
    """

    starts: str
    message: str
    ends: tuple[str, ...]
    reasoning: str
    call: str
    answer: str
    call_head: str = ""

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end a message, or begin the next header."""
        header = first_mark(self.answer)
        return (*self.ends, self.starts, *((header,) if is_mark(header) else ()))


class DerivedFormat(Struct, frozen=True):
    """Output format of one model, named by syntax or `source` family.

    `turn_ends` are the texts that end an answer; `wrappers` are marks around its content. A
    format that is not `is_certain` did not read back every probe: `problems` says which.
    """

    name: str = "text"
    source: FormatSource = FormatSource.NONE
    is_certain: bool = True
    problems: tuple[str, ...] = ()
    reasoning: ReasoningMarks | None = None
    calls: CallSyntax | None = None
    channels: Channels | None = None
    turn_ends: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()

    def opens_thought(self, tail: str) -> bool:
        """Whether the end of a prompt leaves a thought open."""
        if self.reasoning is None:
            return False
        opens = self.reasoning.opens or self.reasoning.prefix
        return bool(opens.strip()) and tail.rfind(opens) > tail.rfind(self.reasoning.closes)

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that are structure, not speech."""
        literals = [*self.turn_ends, *self.wrappers, *self.strays]
        if self.reasoning is not None:
            literals += [self.reasoning.opens, self.reasoning.closes]
        if self.channels is not None:
            literals += [self.channels.starts, self.channels.message, self.channels.answer]
            literals += self.channels.ends
        return tuple(one for one in (*literals, *call_marks(self.calls)) if one.strip())


class ParsedMessage(Struct, frozen=True):
    """A whole answer. `n_unparsed` counts the calls that stayed text."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    n_unparsed: int = 0


def call_marks(syntax: CallSyntax | None) -> tuple[str, ...]:
    """The literals of a call, slots left out."""
    if syntax is None:
        return ()
    literals = [syntax.section_opens, syntax.opens, syntax.closes, syntax.section_closes]
    match syntax.body:
        case TaggedBody() as body:
            literals += [*body.parts, body.argument_opens, body.value_opens, body.value_closes]
        case NamedBody() as body:
            literals += body.parts
        case GemmaBody():
            literals.append(syntax.body.quote)
    return tuple(one for one in literals if one not in (NAME, ID, INDEX))


def pieces(literal: str) -> list[str]:
    """Marks and words of a literal, between which white space varies."""
    return _PIECE.findall(literal)


def first_mark(literal: str) -> str:
    """The text by which a literal is searched for."""
    run = next(iter(literal.split()), "")
    mark = _MARK.match(run)
    return mark[0] if mark else run


def is_mark(text: str) -> bool:
    """Whether a text is one mark and nothing else."""
    return _MARK.fullmatch(text) is not None
