"""Constraint of an answer: its format, its tool calls, its reasoning."""

from msgspec import Struct, structs

from mlxstack.core.conversation import Conversation, Tool
from mlxstack.core.errors import BadRequest
from mlxstack.core.request import SamplingParams
from mlxstack.service.parts.generation_options import GenerationOptions, ToolChoiceMode
from mlxstack.service.parts.text_processor import TextProcessor
from mlxstack.text.grammar.constraint import ConstraintLayout, GrammarConstraint, closed
from mlxstack.text.grammar.forced_tool_call import ForcedCalls
from mlxstack.text.grammar.lazy_calls import CallTrigger
from mlxstack.text.tokens.cached_tokenizer import Prompt

N_TAIL = 16
"""Last tokens of a prompt that may belong to a mark."""

FORBIDDEN = float("-inf")


class AnswerConstraint(Struct, frozen=True):
    """Constraint of one answer."""

    grammar: GrammarConstraint | None = None
    opening: tuple[int, ...] = ()
    """First tokens of a required call, which follow the prompt."""
    is_call: bool = False
    """A tool call is required."""

    @property
    def has_end(self) -> bool:
        """Whether a grammar says where the answer ends."""
        return self.grammar is not None and self.grammar.has_grammar

    @property
    def has_format(self) -> bool:
        """Whether a grammar rules the content."""
        return self.has_end and not self.is_call


FREE = AnswerConstraint()


async def answer_constraint(
    text_processor: TextProcessor,
    options: GenerationOptions,
    conversation: Conversation,
    prompt: Prompt,
) -> AnswerConstraint:
    """Constraint of the answer to a conversation. Raises BadRequest for a bad grammar."""
    output_format = text_processor.output_format
    if options.tool_choice is ToolChoiceMode.REQUIRED:
        opening = _call_opening(text_processor, prompt)
        grammar = await _call_grammar(text_processor, options, conversation.tools)
        return AnswerConstraint(grammar, opening, is_call=True)
    rules = None
    if options.response_format is not None:
        rules = await text_processor.shape_rules(options.response_format)
    has_tools = bool(conversation.tools)
    forbidden: tuple[tuple[int, ...], ...] = ()
    calls = None
    if has_tools and options.tool_choice is ToolChoiceMode.NONE:
        has_tools = False
        forbidden = output_format.call_sequences
    elif has_tools:
        offered = callable_tools(options, conversation.tools)
        calls = await text_processor.free_calls(offered, is_single=options.is_one_call)
    if rules is None and options.thinking_budget is None and not (forbidden or calls):
        return FREE
    layout = _layout(
        text_processor,
        options,
        prompt,
        forbidden,
        calls,
        has_tools=has_tools,
        may_think=text_processor.prompt_maker.variables.may_think(conversation),
    )
    return AnswerConstraint(GrammarConstraint(layout, rules))


async def text_constraint(
    text_processor: TextProcessor, options: GenerationOptions
) -> AnswerConstraint:
    """Constraint of a continued text, which has no reasoning. Raises BadRequest."""
    if options.response_format is None:
        return FREE
    rules = await text_processor.shape_rules(options.response_format)
    if rules is None:
        return FREE
    layout = ConstraintLayout(text_processor.n_vocab, banned=_banned(options))
    return AnswerConstraint(GrammarConstraint(layout, rules))


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


def sampling_of(text_processor: TextProcessor, options: GenerationOptions) -> SamplingParams:
    """Sampling parameters; a forbidden tool call has a single opening token banned.

    An opening of several tokens is up to the constraint; one that is no mark may begin any text.
    """
    sampling = options.sampling
    if options.tool_choice is not ToolChoiceMode.NONE:
        return sampling
    marks = sorted(text_processor.output_format.mark_tokens)
    biases = (*sampling.logit_bias, *((token, FORBIDDEN) for token in marks))
    return structs.replace(sampling, logit_bias=biases)


def _chosen_tools(options: GenerationOptions) -> tuple[str, ...]:
    """Names that `tool_choice` restricts calls to; none if it does not."""
    if options.forced_tool is None:
        return options.allowed_tools
    return (options.forced_tool,)


def _banned(options: GenerationOptions) -> frozenset[int]:
    return frozenset(token for token, bias in options.sampling.logit_bias if bias == FORBIDDEN)


def _call_opening(text_processor: TextProcessor, prompt: Prompt) -> tuple[int, ...]:
    """Opening tokens of a required call. Raises BadRequest for an unknown format.

    A call without a mark has no opening after the header that the prompt ends with.
    """
    output_format = text_processor.output_format
    opening = output_format.call_opening
    if not opening and output_format.call_marks is None:
        raise BadRequest(
            "tool_choice: the tool call format of this model is unknown, so no call can be forced; "
            'use tool_choice "auto"',
            "tool_choice",
        )
    if prompt.is_in_thinking:
        opening = (*output_format.answer_tokens, *opening)
    elif prompt.before:
        opening = (*output_format.message_opening, *opening)
    text_processor.refuse_rowless(opening, "tool_choice")
    return opening


async def _call_grammar(
    text_processor: TextProcessor, options: GenerationOptions, tools: tuple[Tool, ...]
) -> GrammarConstraint | None:
    """Constraint of tool calls; None leaves only the opening forced."""
    marks = text_processor.output_format.call_marks
    if marks is None:
        return None
    is_single = options.is_one_call or options.forced_tool is not None
    calls = ForcedCalls(callable_tools(options, tools), marks, is_single)
    rules = await text_processor.call_rules(calls)
    if rules is None:
        return None
    layout = ConstraintLayout(text_processor.n_vocab, banned=_banned(options))
    return GrammarConstraint(layout, rules)


def _layout(
    text_processor: TextProcessor,
    options: GenerationOptions,
    prompt: Prompt,
    forbidden: tuple[tuple[int, ...], ...],
    calls: CallTrigger | None,
    *,
    has_tools: bool,
    may_think: bool,
) -> ConstraintLayout:
    output_format = text_processor.output_format
    tail = prompt.tokens[-N_TAIL:]
    # The answer begins with the header of a message.
    has_headers = output_format.has_headers and not prompt.before
    is_in_thinking = prompt.is_in_thinking or (has_headers and may_think)
    may_open = may_think and not is_in_thinking and not closed(output_format.answer_tokens, tail)
    openings = (output_format.call_opening,) if has_tools else ()
    if is_in_thinking or may_open:
        text_processor.refuse_rowless(output_format.answer_tokens, "messages")
    return ConstraintLayout(
        n_vocab=text_processor.n_vocab,
        eos=output_format.eos,
        is_in_thinking=is_in_thinking,
        opens=output_format.thought_tokens if may_open else frozenset(),
        closes=output_format.answer_tokens,
        escapes=output_format.call_tokens if has_tools else frozenset(),
        budget=options.thinking_budget,
        may_end=has_headers and has_tools and not may_open,
        headers=(output_format.answer_tokens, *openings) if has_headers and not may_think else (),
        forbidden=forbidden,
        before=tail,
        calls=calls,
        banned=_banned(options),
    )
