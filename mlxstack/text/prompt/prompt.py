"""Builds prompts: token ids and checkpoint positions of conversations and texts."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.core.errors import BadRequest, TooLong
from mlxstack.core.interfaces import AnswerFormat
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.response_parts import CallBlock
from mlxstack.text.normalize_messages import head_tools, pair_results
from mlxstack.text.prompt.checkpoint_positions import after_turn, head_end, tidy, turn_ends
from mlxstack.text.prompt.splicer import NAMELESS, PromptSplicer, SampledAnswer, Scope, merged
from mlxstack.text.template.chat_template import PROBE_CHAR, ChatTemplate, closed
from mlxstack.text.template.variables import TemplateVariables
from mlxstack.text.tokens.cached_tokenizer import CachedTokenizer, Prompt, Splice, common_length
from mlxstack.text.tokens.special_token_escape import unescape
from mlxstack.text.tokens.token_decoder import TokenDecoder

N_BEFORE = 8
UNKNOWN = "sxunknown0"
"""Placeholder of unknown text in ASCII letters, unescaped in JSON."""
CHARS_PER_TOKEN = 8
MIN_COUNTED_CHARS = 200_000
"""Texts up to this length are counted exactly, however small the context."""


class TokenizeOptions(Struct, frozen=True):
    """Special tokens: `add_special` adds BOS and EOS, `parse_special` reads them."""

    add_special: bool = False
    parse_special: bool = True


class PromptMaker:
    """Makes prompts of one model. Thread-safe.

    Texts that are surely longer than `n_ctx` tokens are refused before they are rendered or
    tokenized as a whole, with TooLong. Where two splicers replace the same text, the first does.
    """

    def __init__(
        self,
        encoder: CachedTokenizer,
        template: ChatTemplate,
        variables: TemplateVariables,
        answer_format: AnswerFormat,
        splicers: Sequence[PromptSplicer] = (),
        n_ctx: int | None = None,
    ) -> None:
        self.template = template
        self.variables = variables
        self.pieces = TokenDecoder(encoder.tokenizer)
        self._encoder = encoder
        self._answer_format = answer_format
        self._splicers = splicers
        self._n_ctx = n_ctx
        self._structure = sorted(encoder.special_tokens.structure, key=len, reverse=True)

    def make(self, conversation: Conversation, scope: Scope = NAMELESS) -> Prompt:
        """Prompt of a conversation. Raises BadRequest with the template's message, TooLong.

        What was sampled in this `scope` gets the tokens that were sampled for it.
        """
        conversation = self._prepared(conversation)
        adapted, rendering = self.template.write_cautiously(conversation)
        self._refuse_too_long([rendering])
        splices: list[Splice] = []
        for splicer in self._splicers:
            splices = merged(splices, splicer.splices(scope, conversation, adapted, rendering))
        prompt = self._encoder.encode(rendering, splices)
        end = self._messages_end(rendering, conversation)
        fields: dict[str, Any] = {}
        for splicer in self._splicers:
            fields |= splicer.prompt_fields(conversation, prompt, end)
        return msgspec.structs.replace(
            prompt,
            checkpoint_positions=self._cuts(conversation, adapted, prompt, end),
            is_in_thinking=self._answer_format.opens_thought(rendering[end:]),
            before=prompt.tokens[-N_BEFORE:] if conversation.continue_final else (),
            **fields,
        )

    def remember_calls(self, scope: Scope, block: CallBlock) -> None:
        """Note sampled calls for later prompts."""
        for splicer in self._splicers:
            splicer.remember_calls(scope, block)

    def remember_answer(self, scope: Scope, prompt: Prompt, answer: SampledAnswer) -> None:
        """Note a sampled answer to `prompt` for later prompts."""
        for splicer in self._splicers:
            splicer.remember_answer(scope, prompt, answer)

    def expected(
        self, conversation: Conversation, answer: Message, scope: Scope = NAMELESS
    ) -> PromptTokens:
        """Known beginning of the next prompt after `answer`.

        The tokens are the same whatever the client says next. Raises as `make` does.
        """
        prompt = self.make(_continued(conversation, answer), scope)
        end = prompt.marked.find(UNKNOWN)
        # A template that drops the last message says nothing about where it would stand.
        n_tokens = self._encoder.place(prompt, end) if end >= 0 else 0
        return prompt.first(n_tokens)

    def text(self, conversation: Conversation) -> str:
        """The rendered template, for people. Raises as `make` does."""
        return unescape(self.template.write_cautiously(self._prepared(conversation))[1])

    def _prepared(self, conversation: Conversation) -> Conversation:
        """Conversation with all inputs of the template, not yet adapted.

        Results are paired. Where the template opens no answers (Mistral's form), the last answer is
        continued: the template would end it and leave nothing to write.
        """
        for splicer in self._splicers:
            conversation = splicer.prepare(conversation)
        self._refuse_too_long(self._verbatim_texts(conversation))
        conversation = msgspec.structs.replace(
            conversation,
            messages=pair_results(conversation.messages),
            tools=head_tools(conversation.tools),
            template=self.variables.of(conversation),
        )
        messages = conversation.messages
        is_closing = bool(messages) and _is_text_answer(messages[-1])
        if not is_closing or conversation.continue_final or not conversation.add_generation_prompt:
            return conversation
        if self.template.opening(conversation.template):
            return conversation
        opened = msgspec.structs.replace(conversation, continue_final=True)
        try:
            self.template.write_cautiously(opened)
        except BadRequest:
            return conversation
        return opened

    def plain(
        self, text: str, written: str | None = None, splices: Sequence[Splice] = ()
    ) -> Prompt:
        """Prompt of a raw text, with its special tokens.

        With `splices`, they are those of `written`, which stands for the text.
        """
        self._refuse_too_long([text])
        prompt = self._encoder.encode(text if written is None else written, splices)
        prefix = self._encoder.prefix
        if prompt.tokens[: len(prefix)] == prefix:
            prefix = ()
        tokens = prefix + prompt.tokens
        return Prompt(
            tokens=tokens,
            images=tuple(image.moved(len(prefix)) for image in prompt.images),
            marked=text,
            n_replaced=prompt.n_replaced,
            before=tuple(self.vocabulary_ids(tokens[-N_BEFORE:])),
        )

    def given(self, tokens: Sequence[int]) -> Prompt:
        """The prompt of tokens that a client made itself."""
        return Prompt(tokens=tuple(tokens), before=tuple(tokens[-N_BEFORE:]))

    def joined(self, parts: Sequence[int | str]) -> tuple[int, ...]:
        """Tokens of ids and texts in a row, with an initial prefix."""
        tokens: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, int):
                tokens.append(part)
            elif index == 0:
                tokens += self.plain(part).tokens
            else:
                tokens += self._encoder.encode(part).tokens
        return tuple(tokens)

    def tokenize(self, text: str, spelling: TokenizeOptions) -> tuple[int, ...]:
        """The tokens of a text. Raises TooLong."""
        self._refuse_too_long([text])
        if not spelling.parse_special:
            text = self.template.escape(text)
        tokens = self._encoder.encode(text).tokens
        if not spelling.add_special:
            return tokens
        return self._encoder.prefix + tokens + self._encoder.suffix

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self.pieces.text(self.vocabulary_ids(tokens))

    def plain_text(self, tokens: Sequence[int]) -> str:
        """The text of tokens, with a space in place of special ones."""
        text = self.detokenize(tokens)
        for mark in self._structure:
            text = text.replace(mark, " ")
        return text

    def vocabulary_ids(self, tokens: Sequence[int]) -> Sequence[int]:
        """Tokens with ids of the vocabulary in place of others."""
        for splicer in self._splicers:
            tokens = splicer.vocabulary_ids(tokens)
        return tokens

    def piece(self, token: int) -> str | list[int]:
        """Text of a token, or its bytes if incomplete UTF-8."""
        (token,) = self.vocabulary_ids([token])
        data = self.pieces.of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return list(data)

    def _refuse_too_long(self, texts: Sequence[str]) -> None:
        """Raise TooLong if a lower bound of `texts` already exceeds it.

        Usual texts have 3 to 5 characters per token, so those that may fit are not counted.
        """
        if self._n_ctx is None:
            return
        n_chars = sum(map(len, texts))
        if n_chars <= max(CHARS_PER_TOKEN * self._n_ctx, MIN_COUNTED_CHARS):
            return
        n_tokens = self._encoder.at_least(texts, self._n_ctx)
        if n_tokens > self._n_ctx:
            raise TooLong(n_tokens, self._n_ctx)

    def _messages_end(self, rendering: str, conversation: Conversation) -> int | None:
        """Character between the messages and the opening of the answer."""
        if not conversation.add_generation_prompt or conversation.continue_final:
            return None
        opening = self.template.opening(conversation.template)
        if rendering.endswith(opening):
            return len(rendering) - len(opening)
        return None

    def _cuts(
        self, conversation: Conversation, adapted: Conversation, prompt: Prompt, end: int | None
    ) -> tuple[int, ...]:
        turns = [
            (self._text_runs(self.template.guarded(message))[-1], message.role is Role.USER)
            for message in adapted.messages
            if message.role in (Role.USER, Role.TOOL)
        ]
        stop = len(prompt.marked) if end is None else end
        cuts = [after_turn(prompt, char) for char in turn_ends(prompt.marked, turns, stop)]
        if end is not None:
            cuts.append(self._encoder.place(prompt, end))
        head = self._head_length(conversation, prompt.marked)
        return tidy(head_end(self._encoder, prompt, head), cuts, len(prompt.tokens))

    def _head_length(self, conversation: Conversation, marked: str) -> int:
        """Number of characters of the prompt that are system and tools."""
        head = takewhile(lambda message: message.role is Role.SYSTEM, conversation.messages)
        return common_length(marked, self.template.write(closed(conversation, (*head, PROBE_CHAR))))

    def _verbatim_texts(self, conversation: Conversation) -> list[str]:
        """Texts that every template writes, though possibly stripped.

        Some templates drop the texts of the assistant.
        """
        return [
            run.strip()
            for message in conversation.messages
            if message.role is not Role.ASSISTANT
            for run in self._text_runs(message.text)
        ]

    def _text_runs(self, text: str) -> list[str]:
        runs = [text]
        for splicer in self._splicers:
            runs = [part for run in runs for part in splicer.text_runs(run)]
        return runs


def _is_text_answer(message: Message) -> bool:
    return message.role is Role.ASSISTANT and bool(message.text.strip()) and not message.tool_calls


def _continued(conversation: Conversation, answer: Message) -> Conversation:
    """The conversation as its client will likely go on.

    The results of the calls of the answer follow; the user speaks if it has none.
    """
    results = (
        Message(Role.TOOL, UNKNOWN, tool_call_id=call.id, name=call.name)
        for call in answer.tool_calls
    )
    following = tuple(results) or (Message(Role.USER, UNKNOWN),)
    return msgspec.structs.replace(
        conversation,
        messages=(*conversation.messages, answer, *following),
        add_generation_prompt=True,
        continue_final=False,
    )
