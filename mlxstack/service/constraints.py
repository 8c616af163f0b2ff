"""What rules an answer: the shape that was asked for, the call that must be, the thought's end."""

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.conversation import Conversation, Tool
from mlxstack.core.errors import BadRequest
from mlxstack.service.generation_options import GenerationOptions, ToolChoiceMode
from mlxstack.service.text_processor import TextProcessor
from mlxstack.text.grammar.constraint import ConstraintLayout, GrammarConstraint, closed
from mlxstack.text.grammar.forced_tool_call import ForcedCalls
from mlxstack.text.output_format import OutputFormat
from mlxstack.text.prompt import Prompt

N_TAIL = 16


class ConstraintInputs(Struct, frozen=True):
    """How an answer begins: after `prompt`, with the tokens `forced` on it."""

    conversation: Conversation
    prompt: Prompt
    forced: tuple[int, ...]


async def guide(
    words: TextProcessor, options: GenerationOptions, opening: ConstraintInputs
) -> GrammarConstraint | None:
    """The guide of an answer, None if it may be anything. Raises BadRequest for a bad grammar."""
    if opening.forced:
        return await _call_guide(words, options, opening.conversation.tools)
    rules = (
        None
        if options.response_format is None
        else await words.shape_rules(options.response_format)
    )
    passage = _passage(words, options, opening)
    if rules is None and options.thinking_budget is None and not passage.forbidden:
        return None
    return GrammarConstraint(passage, rules)


async def text_guide(words: TextProcessor, options: GenerationOptions) -> GrammarConstraint | None:
    """The same for a text to be continued, in which there are no thoughts."""
    if options.response_format is None:
        return None
    rules = await words.shape_rules(options.response_format)
    return None if rules is None else GrammarConstraint(ConstraintLayout(words.n_vocab), rules)


def required(options: GenerationOptions, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
    """The tools of which one must be called. Raises BadRequest for a name that none has."""
    if options.forced_tool is None:
        return tools
    found = tuple(tool for tool in tools if tool.name == options.forced_tool)
    if options.tool_choice is ToolChoiceMode.REQUIRED and not found:
        raise BadRequest(f"tool_choice: no tool is named {options.forced_tool!r}", "tool_choice")
    return found


async def _call_guide(
    words: TextProcessor, options: GenerationOptions, tools: tuple[Tool, ...]
) -> GrammarConstraint | None:
    """None if this tokenizer cannot be guided; then the beginning alone is forced."""
    marks = words.output_format.call_marks
    if marks is None:
        return None
    is_single = options.is_one_call or options.forced_tool is not None
    rules = await words.call_rules(ForcedCalls(required(options, tools), marks, is_single))
    return None if rules is None else GrammarConstraint(ConstraintLayout(words.n_vocab), rules)


def _passage(
    words: TextProcessor, options: GenerationOptions, opening: ConstraintInputs
) -> ConstraintLayout:
    output_format = words.output_format
    has_tools = bool(opening.conversation.tools) and options.tool_choice is not ToolChoiceMode.NONE
    may_think, has_headers = opening.prompt.may_think, _has_headers(output_format, opening.prompt)
    before = ConstraintLayout(
        n_vocab=words.n_vocab,
        eos=output_format.eos,
        is_in_thinking=opening.prompt.is_in_thinking or (has_headers and may_think),
        closes=output_format.answer_tokens,
        escapes=output_format.call_tokens if has_tools else frozenset(),
        budget=options.thinking_budget,
        may_end=has_headers and has_tools,
        headers=_headers(output_format, has_tools) if has_headers and not may_think else (),
        forbidden=_forbidden(words, options, opening),
        before=opening.prompt.tokens[-N_TAIL:],
    )
    if before.is_in_thinking or not may_think or closed(before, opening.prompt.tokens[-N_TAIL:]):
        return before
    return replace(before, opens=output_format.thought_tokens, may_end=False)


def _has_headers(output_format: OutputFormat, prompt: Prompt) -> bool:
    """Whether the answer begins with the header of a message."""
    return output_format.has_headers and not prompt.before


def _headers(output_format: OutputFormat, has_tools: bool) -> tuple[tuple[int, ...], ...]:
    """The beginnings of an answer that has no thought."""
    calls = (output_format.call_opening,) if has_tools else ()
    return (output_format.answer_tokens, *calls)


def _forbidden(
    words: TextProcessor, options: GenerationOptions, opening: ConstraintInputs
) -> tuple[tuple[int, ...], ...]:
    """The token sequences that begin a call, where the client forbids calls."""
    if options.tool_choice is not ToolChoiceMode.NONE or not opening.conversation.tools:
        return ()
    return words.output_format.call_sequences
