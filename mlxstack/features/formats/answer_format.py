"""Answer format of one model."""

from collections.abc import Callable, Sequence

from mlxstack.core.conversation import Tool
from mlxstack.core.interfaces import FormatReport
from mlxstack.features.formats.answer_reader import read_answer
from mlxstack.features.formats.output_format import OutputFormat
from mlxstack.features.formats.output_parser import OutputParser
from mlxstack.features.formats.syntax import ParsedMessage, call_marks, is_mark, pieces


class ModelAnswerFormat(OutputFormat):
    """Format of a model's answers, derived from its mlx-lm TokenizerWrapper."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that are structure, not speech."""
        return self.description.marks

    @property
    def marks_of_calls(self) -> tuple[str, ...]:
        """Marks that open and close a call."""
        syntax = self.description.calls
        if syntax is None:
            return ()
        literals = (syntax.section_opens, syntax.opens, syntax.closes, syntax.section_closes)
        return tuple(piece for literal in literals for piece in pieces(literal) if is_mark(piece))

    @property
    def report(self) -> FormatReport:
        """Marks, origin and faults of the format."""
        description = self.description
        reasoning = description.reasoning
        return FormatReport(
            name=description.name,
            source=description.source.value,
            is_certain=description.is_certain,
            problems=description.problems,
            reasoning=None if reasoning is None else (reasoning.opens, reasoning.closes),
            calls=tuple(literal for literal in call_marks(description.calls) if literal.strip()),
            turn_ends=description.turn_ends,
        )

    @property
    def has_thoughts(self) -> bool:
        """Whether answers may have thoughts."""
        return self.description.reasoning is not None or self.description.channels is not None

    def opens_thought(self, tail: str) -> bool:
        """Whether the end of a prompt leaves a thought open."""
        return self.description.opens_thought(tail)

    def parser(
        self,
        make_id: Callable[[], str],
        *,
        tools: Sequence[Tool] = (),
        stops: Sequence[str] = (),
        is_in_thinking: bool = False,
        before: Sequence[int] = (),
        is_raw: bool = False,
        has_grammar: bool = False,
    ) -> OutputParser:
        """Parser of an answer, as `AnswerFormat` says."""
        return OutputParser(
            self,
            make_id,
            tools=tools,
            stops=stops,
            is_in_thinking=is_in_thinking,
            before=before,
            is_raw=is_raw,
            has_grammar=has_grammar,
        )

    def read(
        self, raw: str, tools: Sequence[Tool], *, is_in_thinking: bool, is_open: bool
    ) -> ParsedMessage:
        """Whole raw answer; it continues a text where `is_open`."""
        return read_answer(
            self.description, raw, tools, is_in_thinking=is_in_thinking, is_open=is_open
        )
