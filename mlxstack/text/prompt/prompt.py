"""Builds prompts: token ids and checkpoint positions of conversations and texts."""

import hashlib
import json
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import chain, takewhile
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.core.conversation import Conversation, Message, Role, ToolCall
from mlxstack.core.errors import BadRequest, SetupError, TooLong
from mlxstack.core.image import MARK_OPENS, MEDIA_MARKER, ImagePart, ImageProcessor, marks
from mlxstack.core.prompt_tokens import PromptTokens, without_virtual
from mlxstack.text.formats.derivation import derive_format
from mlxstack.text.images.reader import OMITTED
from mlxstack.text.images.spans import (
    after_images,
    check_media,
    image_splices,
    images_of,
    moved_from_tools,
    unmarked,
    with_own_marks,
    without_images,
)
from mlxstack.text.normalize_messages import head_tools, pair_results
from mlxstack.text.output_format import accent_of
from mlxstack.text.prompt.answer_replay import (
    NAMELESS,
    AnswerEntry,
    AnswerReplay,
    AnswerSplicer,
    Scope,
    closed,
    histories,
)
from mlxstack.text.prompt.checkpoint_positions import after_turn, head_end, tidy, turn_ends
from mlxstack.text.prompt.splices import Splicer
from mlxstack.text.template.adaptation import TemplateCapabilities, adapt_to_template, cautious
from mlxstack.text.template.chat_template import ChatTemplate
from mlxstack.text.template.switches import LEVELS
from mlxstack.text.template.tool_definitions import completed_tools
from mlxstack.text.tokens.cached_tokenizer import CachedTokenizer, Prompt, Splice, common_length
from mlxstack.text.tokens.special_token_escape import SpecialTokenEscaper, unescape
from mlxstack.text.tokens.special_tokens import special_tokens_of
from mlxstack.text.tokens.token_decoder import TokenDecoder

# A noncharacter that no message starts with: it shows where the shared head of a prompt ends.
PROBE_CHAR = Message(Role.USER, "\ufdd1")
PROBE_CALL = Message(Role.ASSISTANT, tool_calls=(ToolCall("call00000", "\ufdd1", {}),))
_IMAGE = ImagePart(b"").mark
SHOWN_TO_USER = (Message(Role.USER, f"a{_IMAGE}b{_IMAGE}c"),)
SHOWN_BY_TOOL = (
    Message(Role.USER, "a"),
    PROBE_CALL,
    Message(Role.TOOL, f"b{_IMAGE}", tool_call_id="call00000", name="act"),
)
NO_TOOL_IMAGES = "[image omitted: the chat template of this model takes none in tool results]"
STANDARD_SWITCH = "enable_thinking"
"""Template variable for thinking, which most templates enable by default."""
N_BEFORE = 8
UNKNOWN = "sxunknown0"
"""Placeholder of unknown text in ASCII letters, unescaped in JSON."""
MAX_TAILS = 64
MAX_VARIABLES = 65_536
CHARS_PER_TOKEN = 8
MIN_COUNTED_CHARS = 200_000
"""Texts up to this length are counted exactly, however small the context."""


class TokenizeOptions(Struct, frozen=True):
    """Special tokens: `add_special` adds BOS and EOS, `parse_special` reads them."""

    add_special: bool = False
    parse_special: bool = True


class PromptMaker:
    """Makes prompts of one model from its mlx-lm TokenizerWrapper. Thread-safe.

    `thinking_default` None lets a model think if it can. `template_kwargs` are the preset's
    variables of the chat template; those of a conversation win. Texts that are surely longer than
    `n_ctx` tokens are refused before they are rendered or tokenized as a whole, with TooLong.
    Without a `processor` the model takes no images.
    """

    def __init__(
        self,
        tokenizer: Any,
        thinking_default: bool | None = None,
        template_kwargs: dict[str, Any] | None = None,
        n_ctx: int | None = None,
        processor: ImageProcessor | None = None,
    ) -> None:
        self._n_ctx = n_ctx
        self._tokenizer = tokenizer
        self._default = thinking_default
        self._variables = template_kwargs or {}
        special_tokens = special_tokens_of(tokenizer)
        self._guard = SpecialTokenEscaper(special_tokens.structure, special_tokens.normalize)
        self._structure = sorted(special_tokens.structure, key=len, reverse=True)
        self._encoder = CachedTokenizer(tokenizer, special_tokens)
        self.template = ChatTemplate(tokenizer, special_tokens)
        self._output_format = derive_format(tokenizer)
        self._tails: dict[bytes, str] = {}
        self._lock = threading.Lock()
        self._splicer = Splicer(
            tokenizer, self.template, self._encoder, accent_of(tokenizer), special_tokens
        )
        self.replay = self._splicer.replay
        self.answers = AnswerReplay()
        self._answer_splicer = AnswerSplicer(
            tokenizer, self._written, self._encoder, special_tokens, self._output_format.marks
        )
        self.pieces = TokenDecoder(tokenizer)
        if processor is not None and processor.written != processor.framed:
            self.template.image_texts = processor.written, processor.framed
        if processor is not None and not self._shows(processor, SHOWN_TO_USER, 2):
            processor = None
        self.processor = processor
        self._placeholder = 0 if processor is None else self._token_of(processor.placeholder)
        self._is_tool_shown = processor is not None and self._shows(processor, SHOWN_BY_TOOL, 1)

    def make(self, conversation: Conversation, scope: Scope = NAMELESS) -> Prompt:
        """Prompt of a conversation. Raises BadRequest with the template's message, TooLong.

        Calls that were sampled in this `scope` get the tokens that were sampled for them.
        """
        conversation = self._prepared(conversation)
        known = self.answers.known(scope, conversation.messages)
        adapted, marked = self._rendered(conversation)
        self._refuse_too_long([marked])
        splices = self._splices(scope, conversation, adapted, marked, known)
        images = self._images(conversation, adapted, marked)
        if images:
            splices = sorted([*splices, *images], key=lambda splice: splice.start)
        prompt = self._encoder.encode(marked, splices)
        end = self._messages_end(marked, conversation)
        return msgspec.structs.replace(
            prompt,
            checkpoint_positions=self._cuts(conversation, adapted, prompt, end),
            is_in_thinking=self._output_format.opens_thought(marked[end:]),
            before=prompt.tokens[-N_BEFORE:] if conversation.continue_final else (),
            answer_at=self._answer_at(conversation, prompt, end),
            history=histories(conversation.messages)[-1],
        )

    def expected(
        self, conversation: Conversation, answer: Message, scope: Scope = NAMELESS
    ) -> PromptTokens:
        """Known beginning of the next prompt after `answer`, with its images.

        The tokens are the same whatever the client says next. Raises as `make` does.
        """
        prompt = self.make(_continued(conversation, answer), scope)
        known = prompt.marked.find(UNKNOWN)
        # A template that drops the last message says nothing about where it would stand.
        n_known = self._encoder.place(prompt, known) if known >= 0 else 0
        return prompt.first(n_known)

    def _with_images(self, conversation: Conversation) -> Conversation:
        """Conversation whose images the template takes where they are."""
        if not any(MARK_OPENS in message.text for message in conversation.messages):
            return conversation
        conversation = with_own_marks(conversation)
        messages = conversation.messages
        if not any(message.images for message in messages):
            return conversation
        if self.processor is None:
            messages = without_images(messages, OMITTED, *Role)
        elif not self._is_tool_shown and self.template.capabilities.takes_user_after_tool:
            messages = moved_from_tools(messages)
        elif not self._is_tool_shown:
            messages = without_images(messages, NO_TOOL_IMAGES, Role.TOOL)
        return msgspec.structs.replace(conversation, messages=messages)

    def _images(
        self, conversation: Conversation, adapted: Conversation, marked: str
    ) -> list[Splice]:
        """Images of adapted messages in their order. Raises BadRequest."""
        if self.processor is None:
            return []
        known = images_of(conversation.messages)
        shown = [known[mark] for m in adapted.messages for mark in marks(m.text) if mark in known]
        return image_splices(self.processor, shown, marked, self._token_of)

    def _token_of(self, text: str) -> int:
        """Id of a special token. Raises SetupError."""
        ids = self._encoder.encode(text).tokens
        if len(ids) != 1:
            raise SetupError(f"the tokenizer has no token {text}, which images need")
        return ids[0]

    def _shows(self, processor: ImageProcessor, probe: Sequence[Message], n: int) -> bool:
        """Whether the template shows the `n` images of a probe."""
        text = self.template.tried(probe, (), {})
        return text is not None and text.count(processor.placeholder) == n

    def text(self, conversation: Conversation) -> str:
        """The rendered template, for people. Raises as `make` does."""
        return unescape(self._rendered(self._prepared(conversation))[1])

    def _prepared(self, conversation: Conversation) -> Conversation:
        """Conversation with all inputs of the template, not yet adapted.

        Results are paired. Where the template opens no answers (Mistral's form), the last answer is
        continued: the template would end it and leave nothing to write.
        """
        conversation = self._with_images(conversation)
        self._refuse_too_long(_heard(conversation))
        conversation = msgspec.structs.replace(
            conversation,
            messages=pair_results(conversation.messages),
            tools=head_tools(conversation.tools),
            template=self._template_variables(conversation),
        )
        messages = conversation.messages
        is_closing = bool(messages) and _is_text_answer(messages[-1])
        if not is_closing or conversation.continue_final or not conversation.add_generation_prompt:
            return conversation
        if self._tail(conversation):
            return conversation
        opened = msgspec.structs.replace(conversation, continue_final=True)
        try:
            self._rendered(opened)
        except BadRequest:
            return conversation
        return opened

    def _rendered(self, conversation: Conversation) -> tuple[Conversation, str]:
        """The adapted conversation and its rendering.

        An order of turns that no probe has shown is written more and more cautiously, until the
        template takes it. Raises BadRequest with its first words.
        """
        if not conversation.messages:
            raise BadRequest("messages is empty; at least one message is needed", "messages")
        capabilities = self.template.capabilities
        refusal: BadRequest | None = None
        for more in chain((capabilities,), cautious(capabilities)):
            adapted = _adapted(conversation, more)
            try:
                return adapted, self.template.render(adapted)
            except BadRequest as error:
                refusal = refusal or error
                if error.param != "messages":
                    break
        assert refusal is not None
        raise refusal

    def _written(self, conversation: Conversation) -> str:
        return self.template.render(_adapted(conversation, self.template.capabilities))

    def _splices(
        self,
        scope: Scope,
        conversation: Conversation,
        adapted: Conversation,
        marked: str,
        known: Mapping[int, AnswerEntry],
    ) -> list[Splice]:
        """Remembered answers, and calls of all other turns, in order."""
        answers = self._answer_splicer.splices(conversation, known, marked)
        n_called = sum(bool(message.tool_calls) for message in conversation.messages)
        if len(answers) >= n_called:
            return answers
        calls = self._splicer.splices(scope, adapted, marked)
        starts = [splice.start for splice in answers]
        for call in calls:
            at = bisect_right(starts, call.start)
            if at == 0 or answers[at - 1].end <= call.start:
                answers.append(call)
        return sorted(answers, key=lambda splice: splice.start)

    def _answer_at(
        self, conversation: Conversation, prompt: Prompt, end: int | None
    ) -> tuple[int, int] | None:
        """Character and token where the answer begins; None if unknown."""
        if not conversation.add_generation_prompt or conversation.continue_final:
            return None
        if end is None:
            ended = msgspec.structs.replace(conversation, add_generation_prompt=False)
            end = common_length(prompt.marked, self._rendered(ended)[1])
            if end == len(prompt.marked):
                end = self._kept_length(ended, prompt)
        n_before = self._encoder.exact_place(prompt, end)
        return None if n_before is None else (end, n_before)

    def _kept_length(self, ended: Conversation, prompt: Prompt) -> int:
        """Prompt length that stays if a call follows.

        Some templates end results otherwise.
        """
        answered = msgspec.structs.replace(ended, messages=(*ended.messages, PROBE_CALL))
        try:
            end = common_length(prompt.marked, self._written(answered))
        except BadRequest:
            return len(prompt.marked)
        is_cut = self._encoder.exact_place(prompt, end) is None
        if is_cut:
            return prompt.chars[prompt.piece_at(end)]
        return end

    def plain(self, text: str, images: Sequence[ImagePart] = ()) -> Prompt:
        """Prompt of a raw text, with its special tokens, and images at media markers."""
        self._refuse_too_long([text])
        splices: list[Splice] = []
        written = text
        if images and self.processor is not None:
            check_media(text, images)
            written = text.replace(MEDIA_MARKER, self.processor.framed)
            splices = image_splices(self.processor, images, written, self._token_of)
        prompt = self._encoder.encode(written, splices)
        prefix = self._encoder.prefix
        n_added = 0 if prompt.tokens[: len(prefix)] == prefix else len(prefix)
        tokens = prefix[:n_added] + prompt.tokens
        return Prompt(
            tokens=tokens,
            images=tuple(image.moved(n_added) for image in prompt.images),
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
        for at, part in enumerate(parts):
            if isinstance(part, int):
                tokens.append(part)
            else:
                tokens += (self._encoder.encode(part) if at else self.plain(part)).tokens
        return tuple(tokens)

    def tokenize(self, text: str, spelling: TokenizeOptions) -> tuple[int, ...]:
        """The tokens of a text. Raises TooLong."""
        self._refuse_too_long([text])
        tokens = self._encoder.encode(
            text if spelling.parse_special else self._guard.text(text)
        ).tokens
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
        """Tokens with the placeholder in place of virtual ids of images."""
        if self.processor is None:
            return tokens
        return without_virtual(tokens, self._placeholder)

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

    def _template_variables(self, conversation: Conversation) -> dict[str, Any]:
        """Template variables of its switches, the preset, and the request. Raises BadRequest."""
        if (size := len(_spelled(conversation.template))) > MAX_VARIABLES:
            raise BadRequest(
                f"chat_template_kwargs have {size} bytes of JSON, at most {MAX_VARIABLES} are "
                "taken; long texts belong into the messages",
                "chat_template_kwargs",
            )
        switches = self.template.switches
        asked = dict(conversation.template)
        effort = asked.get("reasoning_effort")
        if isinstance(effort, str) and effort in LEVELS:
            asked = {**asked, **switches.effort(effort)}
        return {
            **switches.keep,
            **{name: True for name in switches.on if name == STANDARD_SWITCH},
            **self._variables,
            **self._thinking_variables(self._default),
            **self._thinking_variables(conversation.thinking),
            **asked,
        }

    def _thinking_variables(self, thinking: bool | None) -> dict[str, Any]:
        if thinking is None:
            return {}
        switches = self.template.switches
        return {STANDARD_SWITCH: thinking, **(switches.on if thinking else switches.off)}

    def may_think(self, conversation: Conversation) -> bool:
        """Whether neither the request nor the preset switches thinking off."""
        wishes = conversation.template.get(STANDARD_SWITCH), conversation.thinking, self._default
        return next((wish for wish in wishes if wish is not None), True) is not False

    def _messages_end(self, marked: str, conversation: Conversation) -> int | None:
        """Character between the messages and the opening of the answer."""
        if not conversation.add_generation_prompt or conversation.continue_final:
            return None
        tail = self._tail(conversation)
        if marked.endswith(tail):
            return len(marked) - len(tail)
        return None

    def _tail(self, conversation: Conversation) -> str:
        """Text that the template writes to open the answer."""
        key = hashlib.blake2b(_spelled(conversation.template), digest_size=16).digest()
        tail = self._tails.get(key)
        if tail is None:
            bare = msgspec.structs.replace(conversation, messages=(PROBE_CHAR,), tools=())
            opened = self.template.render(bare)
            ended = msgspec.structs.replace(bare, add_generation_prompt=False)
            tail = opened[common_length(opened, self.template.render(ended)) :]
            with self._lock:
                if len(self._tails) >= MAX_TAILS:
                    self._tails.clear()
                self._tails[key] = tail
        return tail

    def _cuts(
        self, conversation: Conversation, adapted: Conversation, prompt: Prompt, end: int | None
    ) -> tuple[int, ...]:
        listeners = [m for m in adapted.messages if m.role in (Role.USER, Role.TOOL)]
        spoken = [(self.template.guarded(m), m.role is Role.USER) for m in listeners]
        if any(MARK_OPENS in text for text, _ in spoken):
            spoken = [(after_images(text), is_user) for text, is_user in spoken]
        stop = len(prompt.marked) if end is None else end
        ends = turn_ends(prompt.marked, spoken, stop)
        cuts = [after_turn(prompt, char) for char in ends]
        cuts.append(None if end is None else self._encoder.place(prompt, end))
        head = self._head_length(conversation, prompt.marked)
        return tidy(head_end(self._encoder, prompt, head), cuts, len(prompt.tokens))

    def _head_length(self, conversation: Conversation, marked: str) -> int:
        """Number of characters of the prompt that are system and tools."""
        head = takewhile(lambda message: message.role is Role.SYSTEM, conversation.messages)
        return common_length(marked, self._written(closed(conversation, (*head, PROBE_CHAR))))


def _adapted(conversation: Conversation, capabilities: TemplateCapabilities) -> Conversation:
    messages = adapt_to_template(conversation.messages, capabilities, conversation.tools)
    tools = conversation.tools and completed_tools(conversation.tools, capabilities)
    return msgspec.structs.replace(conversation, messages=messages, tools=tools)


def _heard(conversation: Conversation) -> list[str]:
    """Texts that every template writes, though possibly stripped.

    Some templates drop the texts of the assistant.
    """
    return [
        (unmarked(m.text) if m.images else m.text).strip()
        for m in conversation.messages
        if m.role is not Role.ASSISTANT
    ]


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


def _spelled(variables: dict[str, Any]) -> bytes:
    return json.dumps(variables, sort_keys=True, default=str).encode()
