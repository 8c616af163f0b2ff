"""Constraints by the answer format of a model: its tool calls, its reasoning, its content."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial

from llguidance import LLMatcher
from msgspec import structs

from mlxstack.core.conversation import Conversation, Tool
from mlxstack.core.errors import BadRequest, Busy
from mlxstack.core.request import SamplingParams
from mlxstack.features.formats.answer_format import ModelAnswerFormat
from mlxstack.features.formats.grammar.client_grammars import ClientGrammars
from mlxstack.features.formats.grammar.constraint import ConstraintLayout, GrammarConstraint, closed
from mlxstack.features.formats.grammar.forced_tool_call import ForcedCalls
from mlxstack.features.formats.grammar.lazy_calls import CallTrigger
from mlxstack.features.formats.grammar.loose_tools import LooseSchemas
from mlxstack.service.parts.answer_constraint import FREE, AnswerConstraint, callable_tools
from mlxstack.service.parts.generation_options import GenerationOptions, ToolChoiceMode
from mlxstack.service.parts.work_threads import ThreadGroup
from mlxstack.text.grammar.compiler import GrammarCompiler
from mlxstack.text.grammar.schema_grammar import ResponseConstraint
from mlxstack.text.tokens.cached_tokenizer import Prompt
from mlxstack.text.tokens.rowless_tokens import RowlessTokens

log = logging.getLogger("mlxstack.service")

N_COMPILERS = 4
N_FREE_COMPILERS = 2
MAX_TOOL_SETS = 16
COMPILE_S = 0.5
"""Seconds that a request waits for the grammar of its optional calls."""
N_TAIL = 16
"""Last tokens of a prompt that may belong to a mark."""

FORBIDDEN = float("-inf")


class FormatConstraints:
    """Constraints of one model's answers; grammars compile in threads of their own."""

    def __init__(
        self,
        threads: ThreadGroup,
        output_format: ModelAnswerFormat,
        n_vocab: int,
        may_think: Callable[[Conversation], bool],
        rowless: RowlessTokens,
        *,
        has_free_rules: bool,
    ) -> None:
        self.output_format = output_format
        self.loose_schemas = LooseSchemas()
        self._threads = threads
        self._n_vocab = n_vocab
        self._may_think = may_think
        self._rowless = rowless
        closes = output_format.answer_tokens
        self._can_close = bool(closes) and not rowless.has_any(closes)
        """Whether there are tokens that close a thought."""
        self._has_free_rules = has_free_rules
        self._grammars = GrammarCompiler(output_format.tokenizer, n_vocab)
        self._client_grammars = ClientGrammars(n_vocab)
        # Grammars delay no prompts, and optional ones none that an answer has to wait for.
        self._compilers = threads.add(N_COMPILERS, "grammars")
        self._free_compilers = threads.add(N_FREE_COMPILERS, "grammars of optional calls")
        self._free_calls: dict[str, list[Future[LLMatcher | None]]] = {}

    def load(self) -> None:
        """Load the tables of the vocabulary, in the background."""
        self._free_compilers.submit(self._grammars.load)

    async def of_answer(
        self, options: GenerationOptions, conversation: Conversation, prompt: Prompt
    ) -> AnswerConstraint:
        """Constraint of the answer to a conversation. Raises BadRequest for a bad grammar."""
        output_format = self.output_format
        if options.tool_choice is ToolChoiceMode.REQUIRED:
            opening = self._call_opening(prompt)
            grammar = await self._call_grammar(options, conversation.tools)
            return AnswerConstraint(grammar, grammar is not None, opening, is_call=True)
        rules = None
        if options.response_format is not None:
            rules = await self.shape_rules(options.response_format)
        has_tools = bool(conversation.tools)
        forbidden: tuple[tuple[int, ...], ...] = ()
        calls = None
        if has_tools and options.tool_choice is ToolChoiceMode.NONE:
            has_tools = False
            forbidden = output_format.call_sequences
        elif has_tools:
            offered = callable_tools(options, conversation.tools)
            calls = await self.free_calls(offered, is_single=options.is_one_call)
        is_bounded = options.thinking_budget is not None and output_format.has_thoughts
        is_free = rules is None and not (is_bounded or forbidden or calls)
        if is_free and not output_format.has_thoughts:
            return FREE
        layout = self._layout(
            options,
            prompt,
            forbidden,
            calls,
            has_tools=has_tools,
            may_think=self._may_think(conversation),
        )
        if is_free:
            return AnswerConstraint(
                thought_end=GrammarConstraint(layout) if self._can_close else None
            )
        if layout.is_in_thinking or layout.opens:
            self._rowless.refuse(layout.closes, "messages")
        return AnswerConstraint(GrammarConstraint(layout, rules), rules is not None)

    async def of_text(self, options: GenerationOptions) -> AnswerConstraint:
        """Constraint of a continued text, which has no reasoning. Raises BadRequest."""
        if options.response_format is None:
            return FREE
        rules = await self.shape_rules(options.response_format)
        if rules is None:
            return FREE
        layout = ConstraintLayout(self._n_vocab, banned=_banned(options))
        return AnswerConstraint(GrammarConstraint(layout, rules), has_end=True)

    def sampling(self, options: GenerationOptions) -> SamplingParams:
        """Sampling parameters; a forbidden tool call has a single opening token banned.

        An opening of several tokens is up to the constraint; one that is no mark may begin any
        text.
        """
        sampling = options.sampling
        if options.tool_choice is not ToolChoiceMode.NONE:
            return sampling
        marks = sorted(self.output_format.mark_tokens)
        biases = (*sampling.logit_bias, *((token, FORBIDDEN) for token in marks))
        return structs.replace(sampling, logit_bias=biases)

    def unenforced(self, options: GenerationOptions, tools: tuple[Tool, ...]) -> tuple[str, ...]:
        """Parts of the schemas of a request that no grammar enforces."""
        paths: tuple[str, ...] = ()
        offered = callable_tools(options, tools)
        if offered:
            paths += self.loose_schemas.of(offered)
        if options.response_format:
            paths += self.loose_schemas.of(options.response_format)
        return paths

    @property
    def all_unenforced(self) -> list[str]:
        """Such parts of all recent requests."""
        return self.loose_schemas.paths

    async def shape_rules(self, shape: ResponseConstraint) -> LLMatcher | None:
        """Matcher of a response format; None without one. Raises BadRequest, Busy."""

        def compiled() -> LLMatcher | None:
            grammar = self._client_grammars.of_shape(shape)
            if grammar.loose:
                self.loose_schemas.add(shape, grammar.loose)
            return self._grammars.compile(grammar.text, shape.param)

        return await self._threads.run(self._compilers, compiled)

    async def call_rules(self, calls: ForcedCalls) -> LLMatcher | None:
        """Matcher of tool calls; None without one. Odd schemas are loosened."""
        return await self._threads.run(self._compilers, partial(self._call_rules, calls))

    def _call_rules(self, calls: ForcedCalls) -> LLMatcher | None:
        grammar = self._client_grammars.of_calls(calls)
        rules = self._grammars.compile(grammar.text, "tools")
        self.loose_schemas.add(calls.tools, grammar.loose)
        return rules

    async def free_calls(self, tools: tuple[Tool, ...], *, is_single: bool) -> CallTrigger | None:
        """Constraint of calls in a free answer; grammars compile in the background.

        Returns when they are compiled, or soon. They are kept for the next request, so that they do
        not end with the client.
        """
        ways = self.output_format.free_call_marks
        if not ways or self._threads.is_closed or not self._has_free_rules:
            return None
        try:
            key = repr((tools, is_single))
        except RecursionError:
            return None
        compiled = self._free_calls.pop(key, None)
        if compiled is None or any(map(_is_refused, compiled)):
            compiled = []
            for marks in ways:
                calls = ForcedCalls(tools, marks, is_single, is_complete=True)
                compiled.append(self._free_compilers.submit(partial(self._free_rules, calls)))
        self._free_calls[key] = compiled
        if len(self._free_calls) > MAX_TOOL_SETS:
            for oldest in self._free_calls.pop(next(iter(self._free_calls))):
                oldest.cancel()
        # The headers of the response say which schemas are loose.
        await asyncio.wait(map(asyncio.wrap_future, compiled), timeout=COMPILE_S)
        rules = [partial(_result, future) for future in compiled]
        return self.output_format.call_trigger(rules, tools)

    def _free_rules(self, calls: ForcedCalls) -> LLMatcher | None:
        """Matcher of optional calls; None where they have no grammar. Raises Busy."""
        try:
            return self._call_rules(calls)
        except BadRequest as error:
            log.info("calls of a free answer have no grammar: %s", error.message)
            return None

    def _call_opening(self, prompt: Prompt) -> tuple[int, ...]:
        """Opening tokens of a required call. Raises BadRequest for an unknown format.

        A call without a mark has no opening after the header that the prompt ends with.
        """
        output_format = self.output_format
        opening = output_format.call_opening
        if not opening and output_format.call_marks is None:
            raise BadRequest(
                "tool_choice: the tool call format of this model is unknown, so no call can be "
                'forced; use tool_choice "auto"',
                "tool_choice",
            )
        if prompt.is_in_thinking:
            opening = (*output_format.answer_tokens, *opening)
        elif prompt.before:
            opening = (*output_format.message_opening, *opening)
        self._rowless.refuse(opening, "tool_choice")
        return opening

    async def _call_grammar(
        self, options: GenerationOptions, tools: tuple[Tool, ...]
    ) -> GrammarConstraint | None:
        """Constraint of tool calls; None leaves only the opening forced."""
        marks = self.output_format.call_marks
        if marks is None:
            return None
        is_single = options.is_one_call or options.forced_tool is not None
        calls = ForcedCalls(callable_tools(options, tools), marks, is_single)
        rules = await self.call_rules(calls)
        if rules is None:
            return None
        layout = ConstraintLayout(self._n_vocab, banned=_banned(options))
        return GrammarConstraint(layout, rules)

    def _layout(
        self,
        options: GenerationOptions,
        prompt: Prompt,
        forbidden: tuple[tuple[int, ...], ...],
        calls: CallTrigger | None,
        *,
        has_tools: bool,
        may_think: bool,
    ) -> ConstraintLayout:
        output_format = self.output_format
        tail = prompt.tokens[-N_TAIL:]
        # The answer begins with the header of a message.
        has_headers = output_format.has_headers and not prompt.before
        is_in_thinking = prompt.is_in_thinking or (has_headers and may_think)
        may_open = may_think and not is_in_thinking
        if closed(output_format.answer_tokens, tail):
            may_open = False
        headers: tuple[tuple[int, ...], ...] = ()
        if has_headers and not may_think:
            headers = (output_format.answer_tokens,)
            if has_tools:
                headers += (output_format.call_opening,)
        return ConstraintLayout(
            n_vocab=self._n_vocab,
            eos=output_format.eos,
            is_in_thinking=is_in_thinking,
            opens=output_format.thought_tokens if may_open else frozenset(),
            closes=output_format.answer_tokens,
            escapes=output_format.call_tokens if has_tools else frozenset(),
            budget=options.thinking_budget,
            thoughts=output_format.thought_marks if options.thinking_budget is not None else None,
            may_end=has_headers and has_tools and not may_open,
            headers=headers,
            forbidden=forbidden,
            before=tail,
            calls=calls,
            banned=_banned(options),
        )


def _banned(options: GenerationOptions) -> frozenset[int]:
    return frozenset(token for token, bias in options.sampling.logit_bias if bias == FORBIDDEN)


def _result(compiled: Future[LLMatcher | None]) -> LLMatcher | None:
    """Compiled grammar, which is waited for.

    None without a place among slow work, or once no more work is accepted.
    """
    try:
        return compiled.result()
    except (CancelledError, Busy):
        return None


def _is_refused(compiled: Future[LLMatcher | None]) -> bool:
    """Whether a grammar was not compiled, and may be at another time."""
    if not compiled.done():
        return False
    return compiled.cancelled() or isinstance(compiled.exception(), Busy)
