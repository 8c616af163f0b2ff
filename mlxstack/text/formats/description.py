"""The description of an output format: reasoning marks, tool-call syntax, marks of the turn."""

from enum import StrEnum

from msgspec import Struct

from mlxstack.core.conversation import ToolCall


class FormatSource(StrEnum):
    """The origin of a description."""

    DERIVED = "derived"
    FAMILY = "family"
    MLX_LM = "mlx-lm"
    NONE = "none"


class ReasoningMarks(Struct, frozen=True):
    """The marks around a thought; `opens` may be written by the template alone."""

    opens: str
    closes: str


class CallSyntax(Struct, frozen=True):
    """The syntax of tool calls, all calls of an answer between `section_opens` and `_closes`."""

    section_opens: str = ""
    section_closes: str = ""
    opens: str = ""
    closes: str = ""


class DerivedFormat(Struct, frozen=True):
    """The output format of one model. `name` says the syntax, or the family of `source`.

    `turn_ends` are the texts that end an answer; `wrappers` stand around its content. A format
    that is not `is_certain` did not read back every probe; `problems` says which.
    """

    name: str = ""
    source: FormatSource = FormatSource.NONE
    is_certain: bool = True
    problems: tuple[str, ...] = ()
    reasoning: ReasoningMarks | None = None
    calls: CallSyntax | None = None
    turn_ends: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()

    def opens_thought(self, tail: str) -> bool:
        """Whether the end of a prompt leaves a thought open."""
        marks = self.reasoning
        return (
            marks is not None
            and bool(marks.opens)
            and (tail.rfind(marks.opens) > tail.rfind(marks.closes))
        )


class ParsedMessage(Struct, frozen=True):
    """A whole answer. `n_unparsed` counts the calls that stayed text."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    n_unparsed: int = 0
