"""Constraint of an answer, and the tools that its calls may name."""

from typing import Protocol

from msgspec import Struct

from mlxstack.core.conversation import Conversation, Tool
from mlxstack.core.errors import BadRequest
from mlxstack.core.interfaces import Constraint
from mlxstack.core.request import SamplingParams
from mlxstack.service.parts.generation_options import GenerationOptions, ToolChoiceMode
from mlxstack.text.tokens.cached_tokenizer import Prompt


class AnswerConstraint(Struct, frozen=True):
    """Constraint of one answer."""

    grammar: Constraint | None = None
    has_end: bool = False
    """A grammar says where the answer ends."""
    opening: tuple[int, ...] = ()
    """First tokens of a required call, which follow the prompt."""
    is_call: bool = False
    """A tool call is required."""
    thought_end: Constraint | None = None
    """Constraint of a free answer from where its thought is to be closed."""

    @property
    def has_format(self) -> bool:
        """Whether a grammar rules the content."""
        return self.has_end and not self.is_call


FREE = AnswerConstraint()


class AnswerConstraints(Protocol):
    """Constraints of one model's answers, callable from the event loop."""

    async def of_answer(
        self, options: GenerationOptions, conversation: Conversation, prompt: Prompt
    ) -> AnswerConstraint:
        """Constraint of the answer to a conversation. Raises BadRequest for a bad grammar."""

    async def of_text(self, options: GenerationOptions) -> AnswerConstraint:
        """Constraint of a continued text, which has no reasoning. Raises BadRequest."""

    def sampling(self, options: GenerationOptions) -> SamplingParams:
        """Sampling parameters, with biases against a forbidden tool call."""

    def unenforced(self, options: GenerationOptions, tools: tuple[Tool, ...]) -> tuple[str, ...]:
        """Parts of the schemas of a request that no grammar enforces."""

    @property
    def all_unenforced(self) -> list[str]:
        """Such parts of all recent requests."""


def check_tool_choice(options: GenerationOptions, tools: tuple[Tool, ...]) -> None:
    """Raises BadRequest for unknown names, and for a required call without tools."""
    if options.tool_choice is ToolChoiceMode.NONE:
        return
    offered = {tool.name for tool in tools}
    for name in _chosen_tools(options):
        if name not in offered:
            raise BadRequest(f"tool_choice: no tool is named {name!r}", "tool_choice")
    if options.tool_choice is ToolChoiceMode.REQUIRED and not tools:
        raise BadRequest(
            "tool_choice requires a tool call, but the request has no tools that the model can "
            'call; list them in tools, or use tool_choice "auto"',
            "tool_choice",
        )


def callable_tools(options: GenerationOptions, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """Tools that calls may name."""
    chosen = _chosen_tools(options)
    if chosen:
        return tuple(tool for tool in tools if tool.name in chosen)
    return tools


def _chosen_tools(options: GenerationOptions) -> tuple[str, ...]:
    """Names that `tool_choice` restricts calls to; none if it does not."""
    if options.forced_tool is None:
        return options.allowed_tools
    return (options.forced_tool,)
