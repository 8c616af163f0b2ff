"""Output format of a model as token ids, computed once per tokenizer."""

from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.conversation import Tool
from mlxstack.text.formats.answer_reader import AnswerReader
from mlxstack.text.formats.call_reader import trigger_marks
from mlxstack.text.formats.derivation import derive_format
from mlxstack.text.formats.description import (
    NAME,
    DerivedFormat,
    PublishedBody,
    first_mark,
    is_mark,
    pieces,
)
from mlxstack.text.grammar.forced_tool_call import CallDelimiters
from mlxstack.text.grammar.lazy_calls import CallTrigger
from mlxstack.text.special_tokens import nameless
from mlxstack.text.token_bytes import TokenBytes


class ParseOptions(Struct, frozen=True):
    """How an answer is to be parsed.

    `tools` are all offered tools, deferred ones too; without any, the marks of a tool call are
    words, as llama-server has it. `stops` count in the answer, not in thoughts or calls.
    `is_in_thinking` and `before` come from the prompt. `is_raw` gives a text completion:
    nothing is a marker and nothing is trimmed.
    """

    tools: tuple[Tool, ...] = ()
    stops: tuple[str, ...] = ()
    is_in_thinking: bool = False
    before: tuple[int, ...] = ()
    is_raw: bool = False


class ModelMarkers(Struct, frozen=True):
    """The marks by which the calls of a model are found in a prompt.

    A block of calls begins with `call_start`, or right after `call_header` if there is one.
    `optional_marks` may stand in a sampled call where the template writes none.
    """

    call_start: str
    call_end: str
    call_header: str = ""
    optional_marks: tuple[str, ...] = ()


class OutputFormat:
    """Made from a mlx-lm TokenizerWrapper, shared by all responses of the model.

    `eos` and `hidden` are tokens that never become text; the hidden ones only matter inside a
    tool call, whose parser may need them. `special` are all that carry no text of their own.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.description = derive_format(tokenizer)
        self.model_markers = markers_of_format(self.description)
        self.eos = frozenset(tokenizer.eos_token_ids)
        self.n_vocab = len(tokenizer)
        self.pieces = TokenBytes(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        marks = (*self.description.marks, *self.model_markers.optional_marks)
        self.special = frozenset(at for at, token in added.items() if token.special)
        self.hidden = frozenset(
            at for at in self.special if not any(added[at].content in mark for mark in marks)
        )
        self.has_headers = self.description.channels is not None
        self.answer_tokens = self._tokens(self._answer_opening())
        self.thought_tokens = _single(self._tokens(self._thought_opening()))
        self.forced_opening = forced_opening(self.description)
        self.call_opening = self._tokens(self.forced_opening)
        self.call_tokens = _single(self.call_opening)
        self.message_opening = self._message_opening()
        self.call_sequences = self._call_sequences()
        self.call_marks = self._call_marks(nameless(tokenizer))
        self.free_call_marks = self._free_call_marks(self.call_marks)

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def _answer_opening(self) -> str:
        """The text after which the answer itself begins."""
        if self.description.channels is not None:
            return self.description.channels.answer
        return self.description.reasoning.closes if self.description.reasoning else ""

    def _thought_opening(self) -> str:
        return self.description.reasoning.opens if self.description.reasoning else ""

    def _message_opening(self) -> tuple[int, ...]:
        """The tokens between an open message and the header of the next, if there are any."""
        channels = self.description.channels
        return () if channels is None else self._tokens(channels.ends[0] + channels.starts)

    def _call_sequences(self) -> tuple[tuple[int, ...], ...]:
        """The token sequences that only a tool call begins with, the single opening left out."""
        channels, syntax = self.description.channels, self.description.calls
        if syntax is None:
            return ()
        if channels is not None:
            recipient = self._tokens(f"{channels.starts} to")
            return self.call_opening[:2], recipient
        found = {self._tokens(mark) for mark in trigger_marks(syntax)}
        return tuple(sorted(one for one in found if one and one != tuple(self.call_tokens)))

    def _call_marks(self, special: dict[str, int]) -> CallDelimiters | None:
        """How a forced call is written; None if the form of this model's calls is not known."""
        syntax = self.description.calls
        if syntax is None or isinstance(syntax.body, PublishedBody):
            return None
        channels = self.description.channels
        head = "" if channels is None else channels.call_head
        is_last = channels is not None
        return CallDelimiters(syntax, self.forced_opening, special, head, is_last)

    def _free_call_marks(self, forced: CallDelimiters | None) -> CallDelimiters | None:
        """How a call begins in a free answer; None where no mark of its own announces it."""
        mark = trigger_mark(self.description)
        if forced is None or not mark:
            return None
        is_last = forced.is_last and not forced.head
        return replace(forced, forced=mark, head="", is_last=is_last)

    def call_trigger(self, rules: Callable[[], LLMatcher | None]) -> CallTrigger | None:
        """The place where `rules` begin in a free answer."""
        if self.free_call_marks is None:
            return None
        mark = self.free_call_marks.forced
        tokens = self._tokens(mark)
        return CallTrigger(
            rules,
            mark.encode(),
            tokens[0] if len(tokens) == 1 else None,
            self.pieces.of,
            lambda text: list(self._tokens(text)),
            self.thought_tokens,
            self.has_headers,
        )

    def reader(self, parse_options: ParseOptions) -> AnswerReader:
        """The reader of one answer."""
        return AnswerReader(
            DerivedFormat() if parse_options.is_raw else self.description,
            parse_options.tools,
            is_in_thinking=parse_options.is_in_thinking and not parse_options.is_raw,
            is_open=bool(parse_options.before),
        )


def markers_of_format(description: DerivedFormat) -> ModelMarkers:
    """The marks around the calls of a prompt."""
    syntax, channels = description.calls, description.channels
    if syntax is None:
        return ModelMarkers("", "")
    if channels is not None:
        start = pieces(syntax.opens)[-1] if syntax.opens else ""
        return ModelMarkers(start, "", channels.starts, ("<|constrain|>",))
    closes = pieces(syntax.section_closes) or pieces(syntax.closes) or [""]
    return ModelMarkers(first_mark(syntax.section_opens or syntax.opens), closes[-1])


def accent_of(tokenizer: Any) -> ModelMarkers:
    """The same from a mlx-lm TokenizerWrapper."""
    return markers_of_format(derive_format(tokenizer))


def forced_opening(description: DerivedFormat) -> str:
    """The text that a forced call begins with: a mark, or as much as never varies."""
    syntax = description.calls
    if syntax is None:
        return ""
    if description.channels is not None:
        return description.channels.call_head.partition(NAME)[0] or syntax.opens
    whole = f"{syntax.section_opens}{syntax.opens}"
    return first_mark(whole) or "{"


def trigger_mark(description: DerivedFormat) -> str:
    """The text that only calls begin with; "" where nothing announces them."""
    syntax, marks, channels = description.calls, description.reasoning, description.channels
    if syntax is None or syntax.is_bare:
        return ""
    whole = f"{syntax.section_opens}{syntax.opens}".lstrip()
    mark = first_mark(whole)
    others = [*description.wrappers, *description.strays, *description.turn_ends]
    others += [] if marks is None else [marks.opens]
    others += [] if channels is None else [channels.answer]
    is_shared = any(first_mark(one) == mark for one in others)
    return mark if is_mark(mark) and not is_shared else whole


def _single(tokens: tuple[int, ...]) -> frozenset[int]:
    """A mark that is one token; of others the first token may begin something else."""
    return frozenset(tokens) if len(tokens) == 1 else frozenset()
