"""Text processing of the loaded model, in threads where it takes long."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from mlxstack.core.conversation import Conversation, Message
from mlxstack.core.errors import BadRequest, TooLong
from mlxstack.core.image import MediaText
from mlxstack.core.interfaces import AnswerFormat
from mlxstack.core.prompt_tokens import PromptTokens, TokenRow, check_images, text_tokens
from mlxstack.service.parts.answer_constraint import AnswerConstraints
from mlxstack.service.parts.request_images import RequestImages
from mlxstack.service.parts.work_threads import ThreadGroup
from mlxstack.text.assembly import ModelText
from mlxstack.text.images.reader import ImageReader
from mlxstack.text.prompt.prompt import TokenizeOptions
from mlxstack.text.prompt.report import notes, refusal
from mlxstack.text.prompt.splicer import NAMELESS, Scope
from mlxstack.text.rendering.renderers import RENDERERS
from mlxstack.text.tokens.cached_tokenizer import Prompt
from mlxstack.text.tokens.rowless_tokens import RowlessTokens

log = logging.getLogger("mlxstack.service")
T = TypeVar("T")

RawPrompt = str | Sequence[int | str] | MediaText

N_THREADS = 4


class TemplateFacts(Struct, frozen=True):
    """Facts of a chat template that outlive its tokenizer."""

    text: str
    """The template as the model's authors wrote it."""
    caps: dict[str, bool]
    """llama-server's `chat_template_caps`, found by trying it."""
    bos: str
    """Text of the token, "" where there is none."""
    eos: str
    has_thoughts: bool
    notes: tuple[str, ...]
    """Limits of the template, one sentence each."""
    is_base: bool = False
    """A base model has no template: it continues text."""
    accepts_images: bool = False


class TextProcessor:
    """Prompts, tokens and pieces of one model, callable from the event loop."""

    def __init__(
        self,
        text: ModelText,
        tokenizer: Any,
        n_vocab: int,
        n_ctx: int,
        threads: ThreadGroup,
        constraints: AnswerConstraints,
        images: RequestImages,
        rowless: RowlessTokens,
    ) -> None:
        self.tokenizer = tokenizer
        self.prompt_maker = text.prompt_maker
        self.output_format: AnswerFormat = text.answer_format
        self.constraints = constraints
        self.threads = threads
        self.n_vocab = n_vocab
        self._images = images
        self.refuse_rowless = rowless.refuse
        self._n_ctx = n_ctx
        self._prompts = threads.add(N_THREADS, "prompts")
        capabilities = self.prompt_maker.template.capabilities
        refused = ""
        if tokenizer.has_chat_template:
            refused = refusal(self.prompt_maker)
        self.template_notes = notes(capabilities, self.output_format.report, refused)
        for note in self.template_notes:
            log.warning("chat template: %s", note)

    @property
    def accepts_images(self) -> bool:
        """Whether engine, template and processor take images."""
        return self._images.accepts_images

    async def prompt(self, conversation: Conversation, scope: Scope = NAMELESS) -> Prompt:
        """Prompt of a conversation. Raises BadRequest with the template's message."""
        await self._images.prepare(conversation)
        prompt = await self.run(lambda: self.prompt_maker.make(conversation, scope))
        self.refuse_rowless(prompt.tokens, "messages")
        return prompt

    async def expected(
        self, conversation: Conversation, answer: Message, scope: Scope = NAMELESS
    ) -> PromptTokens:
        """Expected start of the prompt after an answer. Raises as `prompt` does."""
        return await self.run(lambda: self.prompt_maker.expected(conversation, answer, scope))

    async def read(self, convert: Callable[[ImageReader], T]) -> T:
        """Run `convert`, which takes long for a large body."""
        return await self._images.read(self.run, convert)

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
        written, splices = await self._images.placed(self.run, prompt)
        return await self.run(lambda: self.prompt_maker.plain(prompt.text, written, splices))

    async def tokenize(self, text: str, spelling: TokenizeOptions) -> tuple[int, ...]:
        """The tokens of a text."""
        return await self.run(lambda: self.prompt_maker.tokenize(text, spelling))

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

    async def run(self, work: Callable[[], T]) -> T:
        """Run a job in a thread for prompts. It ends when the client leaves."""
        return await self.threads.run(self._prompts, partial(_budgeted, work))

    @property
    def facts(self) -> TemplateFacts:
        """Facts of the chat template."""
        template = self.prompt_maker.template
        text = str(getattr(self.tokenizer, "chat_template", None) or "")
        capabilities = template.capabilities
        has_calls = capabilities.takes_calls and bool(text)
        return TemplateFacts(
            text=text,
            caps={
                "supports_object_arguments": has_calls and capabilities.takes_objects,
                "supports_parallel_tool_calls": has_calls and capabilities.takes_parallel_calls,
                "supports_preserve_reasoning": template.switches.keeps_thoughts,
                "supports_reasoning_effort": bool(template.switches.levels),
                "supports_string_content": not capabilities.needs_parts,
                "supports_system_role": capabilities.has_system,
                "supports_tool_calls": has_calls,
                "supports_tools": capabilities.takes_tools and bool(text),
                "supports_typed_content": capabilities.needs_parts,
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
