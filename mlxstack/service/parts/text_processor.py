"""Text processing of the loaded model, in threads where it takes long."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, TypeVar

from llguidance import LLMatcher
from msgspec import Struct

from mlxstack.core.conversation import Conversation, Message, Tool
from mlxstack.core.errors import BadRequest, Busy, SetupError, StackError, TemplateOverrun, TooLong
from mlxstack.core.image import ImagePart, MediaText
from mlxstack.core.interfaces import ImageProcessor
from mlxstack.core.preset import Preset, ServiceKind
from mlxstack.core.prompt_tokens import PromptTokens, TokenRow, check_images, text_tokens
from mlxstack.service.parts.image_checks import ImageChecks
from mlxstack.service.parts.work_threads import WorkThreads
from mlxstack.text.assembly import assemble_text
from mlxstack.text.grammar.client_grammars import ClientGrammars
from mlxstack.text.grammar.compiler import GrammarCompiler
from mlxstack.text.grammar.forced_tool_call import ForcedCalls
from mlxstack.text.grammar.lazy_calls import CallTrigger
from mlxstack.text.grammar.loose_tools import LooseSchemas
from mlxstack.text.grammar.response_format import ResponseConstraint
from mlxstack.text.images.reader import TEXT_ONLY, ImageReader
from mlxstack.text.prompt.prompt import TokenizeOptions
from mlxstack.text.prompt.report import notes
from mlxstack.text.prompt.splicer import NAMELESS, Scope
from mlxstack.text.rendering.renderers import RENDERERS
from mlxstack.text.tokens.cached_tokenizer import Prompt
from mlxstack.text.tokens.rowless_tokens import refuse_rowless, tokens_without_rows

log = logging.getLogger("mlxstack.service")
T = TypeVar("T")

RawPrompt = str | Sequence[int | str] | MediaText

N_THREADS = 4
CHANGED = "the model was changed while this request was prepared; send it again"
N_COMPILERS = 4
N_FREE_COMPILERS = 2
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
            text = assemble_text(
                tokenizer, preset.sampling.thinking, preset.template, n_ctx, processor
            )
        except TemplateOverrun as overrun:
            raise SetupError(
                f"the chat template of {preset.model.id} {overrun.reason}; choose another model"
            ) from overrun
        self.prompt_maker = text.prompt_maker
        self.output_format = text.answer_format
        self._images = text.images
        capabilities = self.prompt_maker.template.capabilities
        self.template_notes = notes(capabilities, self.output_format.report)
        for note in self.template_notes:
            log.warning("chat template: %s", note)
        self.n_vocab = n_vocab
        self._rowless = tokens_without_rows(tokenizer, n_vocab)
        self._n_ctx = n_ctx
        self._grammars = GrammarCompiler(tokenizer, n_vocab)
        self._client_grammars = ClientGrammars(n_vocab)
        self._prompts = WorkThreads(N_THREADS, "prompts")
        self._reason: StackError | None = None
        # Grammars delay no prompts, and optional ones none that an answer has to wait for.
        self._compilers = WorkThreads(N_COMPILERS, "grammars")
        self._free_compilers = WorkThreads(N_FREE_COMPILERS, "grammars of optional calls")
        self._image_checks = ImageChecks()
        self._all_threads = (
            self._prompts,
            self._compilers,
            self._free_compilers,
            *self._image_checks.threads,
        )
        if preset.kind is ServiceKind.CHAT:
            self._free_compilers.submit(self._grammars.load)
        self._has_free_rules = preset.structured_output.auto_tool_grammar
        self._free_calls: dict[str, list[Future[LLMatcher | None]]] = {}
        self.loose_schemas = LooseSchemas()

    @property
    def accepts_images(self) -> bool:
        """Whether engine, template and processor take images."""
        return self._images.accepts_images

    def image_reader(self) -> ImageReader:
        """Reader of the images of one request."""
        if self.accepts_images:
            return ImageReader(accepts_images=True, defers=True)
        return TEXT_ONLY

    async def prompt(self, conversation: Conversation, scope: Scope = NAMELESS) -> Prompt:
        """Prompt of a conversation. Raises BadRequest with the template's message."""
        # Images of a stored history may not have been decoded since the start.
        images = [image.data for message in conversation.messages for image in message.images]
        if images:
            await self._image_checks.measure(images)
        prompt = await self.run(lambda: self.prompt_maker.make(conversation, scope))
        self.refuse_rowless(prompt.tokens, "messages")
        return prompt

    async def expected(
        self, conversation: Conversation, answer: Message, scope: Scope = NAMELESS
    ) -> PromptTokens:
        """Expected start of the prompt after an answer. Raises as `prompt` does."""
        return await self.run(lambda: self.prompt_maker.expected(conversation, answer, scope))

    def stuck_work(self, limit_s: float) -> str:
        """Work whose threads have all been busy for `limit_s` seconds, or ""."""
        stuck = (threads.name for threads in self._all_threads if threads.stalled_s() > limit_s)
        return next(stuck, "")

    async def read(self, convert: Callable[[ImageReader], T]) -> T:
        """Run `convert`, which takes long for a large body.

        Images that were not seen before are decoded once, and it runs again.
        """
        reader = self.image_reader()
        converted = await self.run(lambda: convert(reader))
        if not reader.unmeasured:
            return converted
        await self._image_checks.measure(reader.unmeasured)
        return await self.run(lambda: convert(ImageReader(accepts_images=True)))

    async def raw(self, prompt: RawPrompt) -> Prompt:
        """Prompt of texts and tokens in a row, or of a text with images. Raises as `check` does."""
        if isinstance(prompt, str | MediaText):
            plain = await self._plain(prompt)
            self.refuse_rowless(plain.tokens, "prompt")
            return plain
        if len(prompt) > self._n_ctx:
            raise TooLong(len(prompt), self._n_ctx)
        tokens = await self.run(lambda: self.prompt_maker.joined(prompt))
        self.check(tokens, "prompt")
        return self.prompt_maker.given(tokens)

    async def _plain(self, prompt: str | MediaText) -> Prompt:
        if isinstance(prompt, str):
            return await self.run(lambda: self.prompt_maker.plain(prompt))
        if not self.accepts_images:
            raise BadRequest(
                "multimodal_data is not supported; this model reads text only", "prompt"
            )

        def read(reader: ImageReader) -> list[ImagePart]:
            return [
                reader.new({"data": data}, f"prompt.multimodal_data[{i}]")
                for i, data in enumerate(prompt.data)
            ]

        images = await self.read(read)

        def prompt_of_images() -> Prompt:
            written, splices = self._images.raw(prompt.text, images)
            return self.prompt_maker.plain(prompt.text, written, splices)

        return await self.run(prompt_of_images)

    async def tokenize(self, text: str, spelling: TokenizeOptions) -> tuple[int, ...]:
        """The tokens of a text."""
        return await self.run(lambda: self.prompt_maker.tokenize(text, spelling))

    async def shape_rules(self, shape: ResponseConstraint) -> LLMatcher | None:
        """Matcher of a response format; None without one. Raises BadRequest, Busy."""

        def compiled() -> LLMatcher | None:
            grammar = self._client_grammars.of_shape(shape)
            if grammar.loose:
                self.loose_schemas.add(shape, grammar.loose)
            return self._grammars.compile(grammar.text, shape.param)

        return await self.run(compiled, self._compilers)

    async def call_rules(self, calls: ForcedCalls) -> LLMatcher | None:
        """Matcher of tool calls; None without one. Odd schemas are loosened."""
        return await self.run(partial(self._call_rules, calls), self._compilers)

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
        if not ways or self._reason is not None or not self._has_free_rules:
            return None
        try:
            key = repr((tools, is_single))
        except RecursionError:
            return None
        compiled = self._free_calls.pop(key, None)
        if compiled is None or any(map(_is_refused, compiled)):
            asked = (ForcedCalls(tools, one, is_single, is_complete=True) for one in ways)
            compiled = [
                self._free_compilers.submit(partial(self._free_rules, one)) for one in asked
            ]
        self._free_calls[key] = compiled
        if len(self._free_calls) > MAX_TOOL_SETS:
            for oldest in self._free_calls.pop(next(iter(self._free_calls))):
                oldest.cancel()
        # The headers of the response say which schemas are loose.
        await asyncio.wait(map(asyncio.wrap_future, compiled), timeout=COMPILE_S)
        return self.output_format.call_trigger([partial(_result, one) for one in compiled], tools)

    def _free_rules(self, calls: ForcedCalls) -> LLMatcher | None:
        """Matcher of optional calls; None where they have no grammar. Raises Busy."""
        try:
            return self._call_rules(calls)
        except BadRequest as error:
            log.info("calls of a free answer have no grammar: %s", error.message)
            return None

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a few tokens of this model."""
        return self.prompt_maker.detokenize(tokens)

    def plain_text(self, tokens: Sequence[int]) -> str:
        """The text of a few tokens, without special ones."""
        return self.prompt_maker.plain_text(tokens)

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
        """Raise BadRequest for a token without a row in the weights."""
        if self._rowless:
            refuse_rowless(tokens, self._rowless, param)

    def close(self, reason: StackError) -> None:
        """Refuse new and waiting work, which raises `reason`."""
        self._reason = reason
        for threads in self._all_threads:
            threads.close()

    async def run(self, work: Callable[[], T], threads: WorkThreads | None = None) -> T:
        """Run a job in a thread, by default one for prompts.

        It ends when the client leaves.
        """
        if self._reason is not None:
            raise self._reason
        try:
            if threads is None:
                return await self._prompts.run(partial(_budgeted, work))
            return await threads.run(work)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # `close` cancelled the queued work, not the caller.
            raise self._reason or Busy(CHANGED) from None

    @property
    def facts(self) -> TemplateFacts:
        """Facts of the chat template."""
        template = self.prompt_maker.template
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
            has_thoughts=self.output_format.has_thoughts,
            notes=self.template_notes,
            is_base=not self.tokenizer.has_chat_template,
            accepts_images=self.accepts_images,
        )


def _budgeted(work: Callable[[], T]) -> T:
    """Run a job with one budget for its renderings."""
    with RENDERERS.budget():
        return work()


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
