"""Text processing of the loaded model, in threads where it takes long."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from llguidance import LLMatcher
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.conversation import Conversation, Message, Tool
from mlxstack.core.errors import BadRequest, Busy, SetupError, StackError, TemplateOverrun, TooLong
from mlxstack.core.image import ImageProcessor, MediaText, text_tokens
from mlxstack.core.preset import Preset, ServiceKind
from mlxstack.core.prompt_tokens import PromptTokens, TokenRow, check_images
from mlxstack.text.grammar.compiler import GrammarCompiler, warned_keywords
from mlxstack.text.grammar.enforceable import enforceable
from mlxstack.text.grammar.enforced_schema import without_grammar
from mlxstack.text.grammar.forced_tool_call import CallGrammar, ForcedCalls, call_grammar
from mlxstack.text.grammar.grammar_check import is_bounded
from mlxstack.text.grammar.lazy_calls import CallTrigger
from mlxstack.text.grammar.loose_tools import LooseSchemas, ToolLoosener, anywhere, not_objects
from mlxstack.text.grammar.response_format import ResponseConstraint, grammar_of, schema_grammar
from mlxstack.text.grammar.tool_inputs import with_patterns
from mlxstack.text.images.reader import TEXT_ONLY, ImageReader
from mlxstack.text.output_format import OutputFormat
from mlxstack.text.prompt.answer_replay import NAMELESS, Scope
from mlxstack.text.prompt.prompt import PromptMaker, TokenizeOptions
from mlxstack.text.prompt.report import notes
from mlxstack.text.rendering.renderers import RENDERERS
from mlxstack.text.tokens.cached_tokenizer import Prompt
from mlxstack.text.tokens.rowless_tokens import refuse_rowless, tokens_without_rows

log = logging.getLogger("mlxstack.service")
T = TypeVar("T")

RawPrompt = str | Sequence[int | str] | MediaText

N_THREADS = 4
CHANGED = "the model was changed while this request was prepared; send it again"
N_COMPILERS = 2
MAX_TOOL_SETS = 16
COMPILE_S = 0.5
"""Seconds that a request waits for the grammar of its optional calls."""


class TemplateFacts(Struct, frozen=True):
    """Facts of a chat template that outlive its tokenizer.

    `text` is as the model's authors wrote it, `caps` are llama-server's `chat_template_caps`, found
    by trying it; `bos` and `eos` are the texts of these tokens, "" where there is none. `notes` say
    what it cannot do. A base model has no template: it continues text.
    `accepts_images`: whether images are taken.
    """

    text: str
    caps: dict[str, bool]
    bos: str
    eos: str
    has_thoughts: bool
    notes: tuple[str, ...]
    is_base: bool = False
    accepts_images: bool = False


class TextProcessor:
    """Prompts, tokens and pieces of one model, callable from the event loop.

    Raises SetupError for a chat template that exceeds its limits already when it is probed.
    """

    def __init__(
        self, tokenizer: Any, preset: Preset, n_vocab: int, processor: ImageProcessor | None = None
    ) -> None:
        self.tokenizer = tokenizer
        n_ctx = preset.slots.n_ctx
        try:
            self.prompt_maker = PromptMaker(
                tokenizer, preset.sampling.thinking, preset.template, n_ctx, processor
            )
            self.output_format = OutputFormat(tokenizer)
        except TemplateOverrun as overrun:
            raise SetupError(
                f"the chat template of {preset.model.id} {overrun.reason}; choose another model"
            ) from overrun
        capabilities = self.prompt_maker.template.capabilities
        self.template_notes = notes(capabilities, self.output_format.description)
        for note in self.template_notes:
            log.warning("chat template: %s", note)
        self.n_vocab = n_vocab
        self._rowless = tokens_without_rows(tokenizer, n_vocab)
        self._n_ctx = n_ctx
        self._grammars = GrammarCompiler(tokenizer, n_vocab)
        self._pool = ThreadPoolExecutor(N_THREADS, thread_name_prefix="words")
        self._began_at: dict[object, float] = {}
        self._reason: StackError | None = None
        # Slow grammars delay neither prompts nor the grammars that are known to be quick.
        self._compilers = ThreadPoolExecutor(N_COMPILERS, thread_name_prefix="grammars")
        self._checkers = ThreadPoolExecutor(1, thread_name_prefix="grammar-check")
        if preset.kind is ServiceKind.CHAT:
            self._compilers.submit(self._grammars.load)
        self._has_free_rules = preset.structured_output.auto_tool_grammar
        self._loosener = ToolLoosener(self._grammars.probe)
        self._free_calls: dict[str, list[Future[LLMatcher | None]]] = {}
        self.loose_schemas = LooseSchemas()

    @property
    def accepts_images(self) -> bool:
        """Whether engine, template and processor take images."""
        return self.prompt_maker.processor is not None

    def image_reader(self) -> ImageReader:
        """Reader of the images of one request."""
        return ImageReader(accepts_images=True) if self.accepts_images else TEXT_ONLY

    async def prompt(self, conversation: Conversation, scope: Scope = NAMELESS) -> Prompt:
        """Prompt of a conversation. Raises BadRequest with the template's message."""
        prompt = await self.run(lambda: self.prompt_maker.make(conversation, scope))
        self.refuse_rowless(prompt.tokens, "messages")
        return prompt

    async def expected(
        self, conversation: Conversation, answer: Message, scope: Scope = NAMELESS
    ) -> PromptTokens:
        """Expected start of the prompt after an answer. Raises as `prompt` does."""
        return await self.run(lambda: self.prompt_maker.expected(conversation, answer, scope))

    def stalled_s(self) -> float:
        """Seconds without a new job, while all threads are busy."""
        began_at = tuple(self._began_at.values())
        return time.monotonic() - max(began_at) if len(began_at) >= N_THREADS else 0.0

    async def read(self, convert: Callable[[ImageReader], T]) -> T:
        """Run `convert`, which takes long for a large body."""
        return await self.run(lambda: convert(self.image_reader()))

    async def raw(self, prompt: RawPrompt) -> Prompt:
        """Prompt of texts and tokens in a row, or of a text with images. Raises as `check` does."""
        if isinstance(prompt, str | MediaText):
            plain = await self.run(lambda: self._plain(prompt))
            self.refuse_rowless(plain.tokens, "prompt")
            return plain
        if len(prompt) > self._n_ctx:
            raise TooLong(len(prompt), self._n_ctx)
        tokens = await self.run(lambda: self.prompt_maker.joined(prompt))
        self.check(tokens, "prompt")
        return self.prompt_maker.given(tokens)

    def _plain(self, prompt: str | MediaText) -> Prompt:
        if isinstance(prompt, str):
            return self.prompt_maker.plain(prompt)
        if not self.accepts_images:
            raise BadRequest(
                "multimodal_data is not supported; this model reads text only", "prompt"
            )
        reader = self.image_reader()
        images = [
            reader.new({"data": data}, f"prompt.multimodal_data[{i}]")
            for i, data in enumerate(prompt.data)
        ]
        return self.prompt_maker.plain(prompt.text, images)

    async def tokenize(self, text: str, spelling: TokenizeOptions) -> tuple[int, ...]:
        """The tokens of a text."""
        return await self.run(lambda: self.prompt_maker.tokenize(text, spelling))

    async def shape_rules(self, shape: ResponseConstraint) -> LLMatcher | None:
        """Matcher of a response format; None without one. Raises BadRequest."""
        try:
            grammar = await self.run(partial(grammar_of, shape), self._compilers)
            rules = await self._compile(grammar, shape.param)
        except BadRequest as error:
            if shape.schema is None:
                raise
            work = partial(self._blamed, shape.schema, error)
            raise await self.run(work, self._compilers) from None
        if rules is not None:
            keywords = warned_keywords(rules) | without_grammar(shape.schema)
            if keywords:
                self.loose_schemas.add(shape, anywhere(shape.param, keywords))
        return rules

    def _blamed(self, schema: dict[str, Any], error: BadRequest) -> BadRequest:
        """Error of a schema with message and place of its first fault."""
        param, compile_problem = error.param or "schema", self._grammars.probe()

        def problem(part: Any) -> str | None:
            try:
                reason = compile_problem(schema_grammar(part, param))
            except BadRequest as refusal:
                return refusal.message
            return f"{param}: {reason}" if reason else reason

        left_out = enforceable(schema, problem).left_out
        blamed = next((part for part in left_out if part.reason), None)
        if blamed is None:
            return error
        return BadRequest(
            f"{blamed.reason}; this is at {blamed.path} of the schema: change it or leave it out",
            error.param,
        )

    async def call_rules(self, calls: ForcedCalls) -> LLMatcher | None:
        """Matcher of tool calls; None without one. Odd schemas are loosened."""
        tools, left_out = await self.run(partial(with_patterns, calls.tools), self._compilers)
        loose = (*not_objects(calls.tools), *left_out)
        asked = replace(calls, tools=tools)
        try:
            grammar = await self.run(partial(call_grammar, asked), self._compilers)
            rules = await self._compile(grammar.text, "tools")
        except BadRequest as error:
            if error.param != "tools":
                raise
            work = partial(self._loosener.loosened, asked)
            loosened, left_out = await self.run(work, self._compilers)
            loose += left_out
            grammar = await self.run(partial(call_grammar, loosened), self._compilers)
            rules = await self._compile(grammar.text, "tools")
        self._tell_loose(calls.tools, loose, grammar, rules)
        return rules

    async def free_calls(self, tools: tuple[Tool, ...], *, is_single: bool) -> CallTrigger | None:
        """Constraint of calls in a free answer; grammars compile in the background.

        Returns when they are compiled, or soon.
        """
        ways = self.output_format.free_call_marks
        if not ways or self._reason is not None or not self._has_free_rules:
            return None
        try:
            key = repr((tools, is_single))
        except RecursionError:
            return None
        compiled = self._free_calls.pop(key, None)
        if compiled is None:
            asked = (ForcedCalls(tools, one, is_single, is_complete=True) for one in ways)
            compiled = [self._compilers.submit(self._free_rules, one) for one in asked]
        self._free_calls[key] = compiled
        if len(self._free_calls) > MAX_TOOL_SETS:
            del self._free_calls[next(iter(self._free_calls))]
        # The headers of the response say which schemas are loose.
        await asyncio.wait(map(asyncio.wrap_future, compiled), timeout=COMPILE_S)
        return self.output_format.call_trigger([partial(_result, one) for one in compiled], tools)

    def _free_rules(self, calls: ForcedCalls) -> LLMatcher | None:
        """Matcher of optional calls; None where they have no grammar."""
        tools, left_out = with_patterns(calls.tools)
        loose = (*not_objects(calls.tools), *left_out)
        asked = replace(calls, tools=tools)
        try:
            try:
                grammar = call_grammar(asked)
                rules = self._bounded(grammar)
            except BadRequest as error:
                if error.param != "tools":
                    raise
                loosened, left_out = self._loosener.loosened(asked)
                loose += left_out
                grammar = call_grammar(loosened)
                rules = self._bounded(grammar)
            self._tell_loose(calls.tools, loose, grammar, rules)
            return rules
        except BadRequest as error:
            log.info("calls of a free answer have no grammar: %s", error.message)
            return None

    def _tell_loose(
        self,
        tools: tuple[Tool, ...],
        loose: tuple[str, ...],
        grammar: CallGrammar,
        rules: LLMatcher | None,
    ) -> None:
        keywords = set() if rules is None else warned_keywords(rules) | grammar.unenforced
        self.loose_schemas.add(tools, (*loose, *anywhere("tools", keywords)))

    def _bounded(self, grammar: CallGrammar) -> LLMatcher | None:
        """Matcher of calls. Raises BadRequest if compiling may take long."""
        if not is_bounded(grammar.text):
            raise BadRequest("tools: compiling their schemas may take long", "tools")
        return self._grammars.compile(grammar.text, "tools")

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a few tokens of this model."""
        return self.prompt_maker.detokenize(tokens)

    def piece(self, token: int) -> bytes:
        """Bytes of one token."""
        return self.prompt_maker.pieces.of(token)

    def check_kept(self, row: TokenRow, param: str) -> None:
        """As `check`, for tokens whose KV is kept, those of images included."""
        try:
            check_images(row.tokens, row.images)
        except ValueError as error:
            raise BadRequest(f"{param}: {error}", param) from None
        if row.images and not self.accepts_images:
            raise BadRequest(f"{param}: this model reads text only", param)
        self.check(text_tokens(row.tokens), param)

    def check(self, tokens: Sequence[int], param: str) -> None:
        """Raises TooLong for too many tokens, BadRequest for one outside the vocabulary."""
        if len(tokens) > self._n_ctx:
            raise TooLong(len(tokens), self._n_ctx)
        for token in tokens:
            if not 0 <= token < self.n_vocab:
                self.refuse_rowless((token,), param)
                raise BadRequest(f"token {token} is not in the vocabulary of {self.n_vocab}", param)

    def refuse_rowless(self, tokens: Sequence[int], param: str) -> None:
        """Raise BadRequest for a token of the tokenizer without a row in the weights."""
        if self._rowless:
            refuse_rowless(tokens, self._rowless, param)

    def close(self, reason: StackError) -> None:
        """Refuse new and waiting work, which raises `reason`."""
        self._reason = reason
        for pool in (self._pool, self._compilers, self._checkers):
            pool.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

    async def _compile(self, grammar: str, param: str) -> LLMatcher | None:
        is_slow = self._grammars.needs_check(grammar)
        pool = self._checkers if is_slow else self._compilers
        return await self.run(lambda: self._grammars.compile(grammar, param), pool)

    async def run(self, work: Callable[[], T], pool: Executor | None = None) -> T:
        """Run a job in a thread, by default one for prompts."""
        if self._reason is not None:
            raise self._reason
        loop = asyncio.get_running_loop()
        try:
            if pool is None:
                return await loop.run_in_executor(self._pool, self._budgeted, work)
            return await loop.run_in_executor(pool, work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # `close` cancelled the queued work, not the caller.
            raise self._reason or Busy(CHANGED) from None

    def _budgeted(self, work: Callable[[], T]) -> T:
        """Run a job with one budget for its renderings."""
        job = object()
        self._began_at[job] = time.monotonic()
        try:
            with RENDERERS.budget():
                return work()
        finally:
            del self._began_at[job]

    @property
    def facts(self) -> TemplateFacts:
        """Facts of the chat template."""
        answer, template = self.output_format.description, self.prompt_maker.template
        text = str(getattr(self.tokenizer, "chat_template", None) or "")
        known = template.capabilities
        has_calls = known.takes_calls and bool(text)
        return TemplateFacts(
            text=text,
            caps={
                "supports_object_arguments": has_calls and known.takes_objects,
                "supports_parallel_tool_calls": has_calls and known.takes_parallel_calls,
                "supports_preserve_reasoning": template.switches.keeps_thoughts,
                "supports_reasoning_effort": bool(template.switches.levels),
                "supports_string_content": not known.needs_parts,
                "supports_system_role": known.has_system,
                "supports_tool_calls": has_calls,
                "supports_tools": known.takes_tools and bool(text),
                "supports_typed_content": known.needs_parts,
            },
            bos=str(getattr(self.tokenizer, "bos_token", None) or ""),
            eos=str(getattr(self.tokenizer, "eos_token", None) or ""),
            has_thoughts=answer.reasoning is not None or answer.channels is not None,
            notes=self.template_notes,
            is_base=not self.tokenizer.has_chat_template,
            accepts_images=self.accepts_images,
        )


def _result(compiled: Future[LLMatcher | None]) -> LLMatcher | None:
    """The compiled grammar, waited for; None once no more work is accepted."""
    try:
        return compiled.result()
    except CancelledError:
        return None
