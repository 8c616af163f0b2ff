"""Tree that describes a model's answers: marks, calls and their arguments.

The nodes hold what a template writes. `call_reader` reads an answer along them, and
`features.formats.grammar.constrain` writes the grammar of a call from the same nodes.
"""

import json
import re
from collections.abc import Callable
from enum import StrEnum
from typing import Any, ClassVar

from msgspec import Struct

from mlxstack.core.conversation import ToolCall

MIN_TAG = 2
NAME = "{name}"
ID = "{id}"
INDEX = "{index}"
ARGUMENTS = "{arguments}"
TYPE = "{type}"
KEY = "{key}"
COUNT = "{count}"
"""Slots among the literal parts of a written call."""

GEMMA_HEAD = "call:"

# A token before a tag belongs to it.
_PREFIX = r"(?:\]<\][^\s<>\[\]]+\[>\[)?"
_PIECE = re.compile(
    rf"{_PREFIX}<(?!\][^\s<>\[\]]+\[>\[)[^<>\s]*>?|\[[^\[\]\s]*\]?|(?:(?!\]<\])[^\s<\[])+|\]"
)
_MARK = re.compile(rf"{_PREFIX}<[^<>\s]+>|\[[^\[\]\s]+\]")


def pieces(literal: str) -> list[str]:
    """Marks and words of a literal, between which white space varies."""
    return _PIECE.findall(literal)


def first_mark(literal: str) -> str:
    """The text by which a literal is searched for."""
    run = next(iter(literal.split()), "")
    mark = _MARK.match(run)
    if mark:
        return mark[0]
    return run


def is_mark(text: str) -> bool:
    """Whether a text is one mark and nothing else."""
    return _MARK.fullmatch(text) is not None


class FormatSource(StrEnum):
    """The origin of a description."""

    DERIVED = "derived"
    FAMILY = "family"
    MLX_LM = "mlx-lm"
    FALLBACK = "fallback"
    NONE = "none"


class ReasoningMarks(Struct, frozen=True):
    """Marks around a thought."""

    opens: str
    """Empty where none is needed."""

    closes: str

    prefix: str = ""
    """Words of the prompt that a thought begins with."""


class CallBody(Struct, frozen=True):
    """Node of a call between its marks."""

    parts: tuple[str, ...]
    """Literals and slots, as the call is written; arguments in pairs or parentheses follow."""

    kind: ClassVar[str] = ""
    is_object: ClassVar[bool] = False
    """Whether the whole call is a JSON object."""

    ends_in_bracket: ClassVar[bool] = False
    """Whether its last character is the bracket of JSON arguments."""

    is_verbatim: ClassVar[bool] = False
    """Whether text stands in it as it is, up to a mark."""

    has_grammar: ClassVar[bool] = True
    begins_with_name: ClassVar[bool] = False
    name_ends: ClassVar[str] = ""
    """Character right after the name, where the name alone tells a call from a text."""

    heads: ClassVar[tuple[str, ...]] = ()
    """Texts that may stand before the name in place of the first part."""

    @property
    def literals(self) -> tuple[str, ...]:
        """Its literals, slots left out."""
        return ()

    @property
    def brackets(self) -> tuple[str, str] | None:
        """Texts around calls that share their marks, if they do."""
        return None

    def opening(self, name: str) -> str:
        """Text of an unmarked call up to its arguments; "" if it varies."""
        del name
        return ""

    def _up_to_arguments(self, name: str) -> str:
        end = self.parts.index(ARGUMENTS) if ARGUMENTS in self.parts else len(self.parts)
        if ID in self.parts[:end]:
            return ""
        return "".join(name if part == NAME else part for part in self.parts[:end])

    @property
    def up_to_name(self) -> str:
        """Beginning of a call up to the mark after its name."""
        end = self.parts.index(NAME) + 1 if NAME in self.parts else len(self.parts)
        after = next(iter(self.parts[end:]), "")
        if after in (ARGUMENTS, ID, INDEX):
            after = ""
        mark = ""
        if after[:1] in ("<", "["):
            mark = first_mark(after)
        return "".join(self.parts[:end]) + (mark if is_mark(mark) else after[:1])


class JsonBody(CallBody, frozen=True):
    """Call as JSON object, or in a list of objects."""

    kind: ClassVar[str] = "json"
    is_object: ClassVar[bool] = True
    ends_in_bracket: ClassVar[bool] = True

    name: tuple[str, ...]
    """Path of the name; empty: the name is the only key, and the arguments are its value."""

    arguments: tuple[str, ...]
    id: tuple[str, ...] = ()
    is_list: bool = False
    list_opens: str = "["
    list_closes: str = "]"

    @property
    def brackets(self) -> tuple[str, str] | None:
        if self.is_list:
            return (self.list_opens, self.list_closes)
        return None

    def opening(self, name: str) -> str:
        if self.is_list:
            return ""
        return self._up_to_arguments(json.dumps(name)[1:-1])


class NamedBody(CallBody, frozen=True):
    """A name between literal parts, then the arguments as a JSON object."""

    kind: ClassVar[str] = "named_json"
    ends_in_bracket: ClassVar[bool] = True
    begins_with_name: ClassVar[bool] = True

    @property
    def literals(self) -> tuple[str, ...]:
        return self.parts

    def opening(self, name: str) -> str:
        return self._up_to_arguments(name)


class TaggedBody(CallBody, frozen=True):
    """Name between literals, then a pair of tags per argument.

    Text is written as it is, and other values as JSON.
    """

    kind: ClassVar[str] = "tagged"
    is_verbatim: ClassVar[bool] = True
    begins_with_name: ClassVar[bool] = True

    argument_opens: str
    value_opens: str
    """Text between key and value; may hold `{type}`."""

    value_closes: str
    """May hold `{key}`; empty only with `has_json_text`."""

    types: tuple[tuple[str, str], ...] = ()
    """Words of the slot `{type}` by JSON type."""

    has_json_text: bool = False
    """Text is JSON too; `argument_opens` may then be mere white space."""

    item: str = ""
    """Objects are nested arguments, and lists nested arguments of this name."""

    @property
    def literals(self) -> tuple[str, ...]:
        return (*self.parts, self.argument_opens, self.value_opens, self.value_closes)


class PythonBody(CallBody, frozen=True):
    """Python calls with keyword arguments, in a list or not."""

    kind: ClassVar[str] = "pythonic"
    name_ends: ClassVar[str] = "("

    parts: tuple[str, ...] = (NAME, "(")
    is_list: bool = True
    has_bare_text: bool = False
    """Text is written without quotes."""

    has_quoted_values: bool = False
    """All values have quotes."""

    @property
    def brackets(self) -> tuple[str, str] | None:
        if self.is_list:
            return ("[", "]")
        return ("", "")


class GemmaBody(CallBody, frozen=True):
    """`call:name{key:value}`, with `quote` around text."""

    kind: ClassVar[str] = "gemma"
    name_ends: ClassVar[str] = "{"
    heads: ClassVar[tuple[str, ...]] = ("call:", ":call:", ":")

    parts: tuple[str, ...] = ("call:", NAME, "{")
    quote: str = '<|"|>'
    is_flat: bool = False
    """Values are no objects or lists."""

    @property
    def literals(self) -> tuple[str, ...]:
        return (self.quote,)


class PublishedBody(CallBody, frozen=True, kw_only=True):
    """Section text that a parser of mlx-lm reads."""

    kind: ClassVar[str] = "published"
    has_grammar: ClassVar[bool] = False

    parts: tuple[str, ...] = (NAME,)
    parser: Callable[[str, Any], Any]


class CallSyntax(Struct, frozen=True):
    """A section of tool calls, each with a body.

    Literals are kept as the template writes them.
    """

    body: CallBody
    section_opens: str = ""
    section_closes: str = ""
    opens: str = ""
    """Mark of each call; that of a list may hold `{count}`, the number of its calls."""

    closes: str = ""
    between: str = ""
    """Text between two calls."""

    @property
    def is_bare(self) -> bool:
        """Whether no mark announces a call."""
        return not self.section_opens.strip() and not self.opens.strip()

    @property
    def closings(self) -> tuple[str, ...]:
        """Literals that end a call, and its section."""
        return tuple(text for text in (self.closes, self.section_closes) if text.strip())

    @property
    def strict_marks(self) -> set[str]:
        """The marks that announce calls."""
        return {first_mark(text) for text in (self.section_opens, self.opens)} - {""}

    @property
    def trigger_marks(self) -> set[str]:
        """Opening marks, and the one of calls without the first."""
        inner = pieces(self.opens)[1:]
        tags = [piece for piece in inner if piece.startswith("<") and len(piece) > MIN_TAG]
        return self.strict_marks | set(tags[-1:])


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
    """Answer of several messages, each behind a header before `message`."""

    starts: str
    """Text that opens a header after one of `ends`."""

    message: str
    ends: tuple[str, ...]
    reasoning: str
    """Regular expression of the header of a thought."""

    call: str
    """Regular expression of the header of a call.

    It has a group `name`, and maybe `space`, without which only an offered tool makes a call.
    """

    answer: str
    """Header of a plain answer."""

    call_head: str = ""
    """Header of a call that stands in the message itself."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end a message, or begin the next header."""
        header = first_mark(self.answer)
        return (*self.ends, self.starts, *((header,) if is_mark(header) else ()))


class DerivedFormat(Struct, frozen=True):
    """Output format of one model."""

    name: str = "text"
    """Kind of its calls, or its family."""

    source: FormatSource = FormatSource.NONE
    is_certain: bool = True
    """Whether every probe was read back; else `problems` are the others."""

    problems: tuple[str, ...] = ()
    reasoning: ReasoningMarks | None = None
    calls: CallSyntax | None = None
    channels: Channels | None = None
    turn_ends: tuple[str, ...] = ()
    """Texts that end an answer."""

    wrappers: tuple[str, ...] = ()
    """Marks around the content."""

    strays: tuple[str, ...] = ()
    """Marks before content that a thought precedes."""

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
        return tuple(text for text in (*literals, *call_marks(self.calls)) if text.strip())


class ParsedMessage(Struct, frozen=True):
    """A whole answer."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    n_unparsed: int = 0
    """Number of calls that stayed text."""


def call_marks(syntax: CallSyntax | None) -> tuple[str, ...]:
    """The literals of a call, slots left out."""
    if syntax is None:
        return ()
    around = (syntax.section_opens, syntax.opens, syntax.closes, syntax.section_closes)
    literals = (*around, *syntax.body.literals)
    return tuple(text for text in literals if text not in (NAME, ID, INDEX))
