"""Output format of a model as token ids, computed once per tokenizer."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from llguidance import LLMatcher
from msgspec.structs import replace

from mlxstack.core.conversation import Tool
from mlxstack.core.interfaces import CallMarkers
from mlxstack.features.formats.derivation import derive_format
from mlxstack.features.formats.grammar.constraint import ThoughtMarks
from mlxstack.features.formats.grammar.forced_tool_call import CallDelimiters
from mlxstack.features.formats.grammar.lazy_calls import CallOpening, CallTrigger
from mlxstack.features.formats.syntax import (
    NAME,
    CallSyntax,
    DerivedFormat,
    first_mark,
    is_mark,
    pieces,
)
from mlxstack.text.tokens.pattern_panics import refuse_panic
from mlxstack.text.tokens.special_tokens import nameless
from mlxstack.text.tokens.token_decoder import TokenDecoder


class OutputFormat:
    """Made from a mlx-lm TokenizerWrapper, shared by all responses of the model.

    `eos` and `hidden` are tokens that never become text; the hidden ones only matter inside a
    tool call, whose parser may need them. `special` are all that carry no text of their own.
    `unspellable` are the tokens that no grammar spells. `mark_tokens` are those of `call_tokens`
    that begin nothing but a call.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.description = derive_format(tokenizer)
        self.call_markers = markers_of_format(self.description)
        self.eos = frozenset(tokenizer.eos_token_ids)
        self.pieces = TokenDecoder(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {})
        marks = (*self.description.marks, *self.call_markers.optional)
        self.unspellable = frozenset(nameless(tokenizer).values())
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)
        self.hidden = frozenset(
            token_id
            for token_id in self.special
            if not any(added[token_id].content in mark for mark in marks)
        )
        self.has_headers = self.description.channels is not None
        self.trigger_mark = trigger_mark(self.description)
        self.answer_tokens = self._tokens(self._answer_opening())
        reasoning = self.description.reasoning
        self.thought_tokens = _single(self._tokens(reasoning.opens if reasoning else ""))
        self.thought_marks = self._thought_marks()
        self.forced_opening = forced_opening(self.description)
        self.call_opening = self._tokens(self.forced_opening)
        self.call_tokens = _single(self.call_opening)
        is_bare = self.description.calls is None or self.description.calls.is_bare
        self.mark_tokens = frozenset() if is_bare else self.call_tokens
        self.message_opening = self._message_opening()
        self.call_sequences = self._call_sequences()
        self.call_marks = self._call_marks(nameless(tokenizer))
        self.free_call_marks = self._free_call_marks()

    def _tokens(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        try:
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        except BaseException as error:
            refuse_panic(error)
            raise

    def _answer_opening(self) -> str:
        """The text after which the answer itself begins."""
        if self.description.channels is not None:
            return self.description.channels.answer
        if self.description.reasoning:
            return self.description.reasoning.closes
        return ""

    def _thought_marks(self) -> ThoughtMarks | None:
        """Marks of thoughts; None for channels, and without any."""
        reasoning = self.description.reasoning
        if reasoning is None or self.has_headers:
            return None
        opening = "" if self.thought_tokens else reasoning.opens.strip()
        closing = "" if len(self.answer_tokens) == 1 else reasoning.closes.strip()
        return ThoughtMarks(self.thought_tokens, opening.encode(), closing.encode(), self.pieces.of)

    def _message_opening(self) -> tuple[int, ...]:
        """Tokens between an open message and the next header, if any."""
        channels = self.description.channels
        if channels is None:
            return ()
        return self._tokens(channels.ends[0] + channels.starts)

    def _call_sequences(self) -> tuple[tuple[int, ...], ...]:
        """Token sequences that only calls begin with, without the opening."""
        channels = self.description.channels
        syntax = self.description.calls
        if syntax is None:
            return ()
        if channels is not None and not channels.call_head:
            recipient = self._tokens(f"{channels.starts} to")
            if self.call_opening:
                return (self.call_opening[:2], recipient)
            return ()
        shared = _shared_marks(self.description)
        marks = syntax.trigger_marks - shared
        whole = {self.trigger_mark} if shared & syntax.trigger_marks else set()
        sequences = {self._tokens(mark) for mark in marks | whole}
        return tuple(sorted(sequences - {(), tuple(self.mark_tokens)}))

    def _call_marks(self, special: dict[str, int]) -> CallDelimiters | None:
        """Delimiters of a forced call; None for an unknown syntax."""
        syntax = self.description.calls
        if syntax is None or not syntax.body.has_grammar:
            return None
        channels = self.description.channels
        head = "" if channels is None else channels.call_head
        is_last = channels is not None
        return CallDelimiters(syntax, self.forced_opening, special, head, is_last)

    def _free_call_marks(self) -> tuple[CallDelimiters, ...]:
        """Ways to begin a call in a free answer, unambiguously."""
        forced = self.call_marks
        syntax = self.description.calls
        if forced is None or syntax is None:
            return ()
        if not self.trigger_mark:
            if named_opening(self.description, ""):
                return (forced,)
            return ()
        is_last = forced.is_last and not forced.head
        ways = [replace(forced, forced=self.trigger_mark, head="", is_last=is_last)]
        shared = _shared_marks(self.description)
        for mark in sorted(syntax.strict_marks - shared - {self.trigger_mark}):
            # The first mark of a section is left out now and then.
            if is_mark(mark) and len(self._tokens(mark)) == 1 and not forced.is_last:
                alone = replace(syntax, section_opens="", section_closes="")
                ways.append(replace(forced, syntax=alone, forced=mark, head=""))
        if (swapped := recipient_first(self.description)) is not None:
            ways.append(replace(forced, syntax=swapped, forced=swapped.opens))
        return tuple(ways)

    def call_trigger(
        self, rules: Sequence[Callable[[], LLMatcher | None]], tools: Iterable[Tool]
    ) -> CallTrigger | None:
        """Triggers of calls in free answers, one of `rules` each."""
        if not self.free_call_marks:
            return None
        is_first = not self.trigger_mark and not self.has_headers
        ways = zip(self.free_call_marks, rules, strict=True)
        return CallTrigger(
            tuple(self._opening(marks, grammar, tools) for marks, grammar in ways),
            self.pieces.of,
            lambda text: list(self._tokens(text)),
            self.thought_tokens,
            is_anywhere=self.has_headers,
            is_first=is_first,
            skipped=self.special | _single(self.answer_tokens) if is_first else frozenset(),
        )

    def _opening(
        self, marks: CallDelimiters, rules: Callable[[], LLMatcher | None], tools: Iterable[Tool]
    ) -> CallOpening:
        if self.trigger_mark:
            tokens = self._tokens(marks.forced)
            text = marks.forced.encode()
            return CallOpening((text,), len(text), rules, tokens[0] if len(tokens) == 1 else None)
        channels = self.description.channels
        opening = marks.forced if channels is None else channels.starts
        texts = tuple(named_opening(self.description, tool.name).encode() for tool in tools)
        return CallOpening(texts, len(opening.encode()), rules)


def markers_of_format(description: DerivedFormat) -> CallMarkers:
    """The marks around the calls of a prompt."""
    syntax = description.calls
    channels = description.channels
    if syntax is None:
        return CallMarkers("", "")
    if channels is not None:
        start = ""
        if syntax.opens:
            start = pieces(syntax.opens)[-1]
        return CallMarkers(start, "", channels.starts, ("<|constrain|>",))
    closes = pieces(syntax.section_closes) or pieces(syntax.closes) or [""]
    return CallMarkers(first_mark(syntax.section_opens or syntax.opens), closes[-1])


def accent_of(tokenizer: Any) -> CallMarkers:
    """Output format of a mlx-lm TokenizerWrapper."""
    return markers_of_format(derive_format(tokenizer))


def forced_opening(description: DerivedFormat) -> str:
    """Invariable opening of a forced call: a mark, or more."""
    syntax = description.calls
    if syntax is None:
        return ""
    if description.channels is not None:
        return description.channels.call_head.partition(NAME)[0] or syntax.opens
    return trigger_mark(description) or first_mark(f"{syntax.section_opens}{syntax.opens}") or "{"


def trigger_mark(description: DerivedFormat) -> str:
    """The text that only calls begin with; "" where nothing announces them."""
    syntax = description.calls
    if syntax is None or syntax.is_bare:
        return ""
    whole = f"{syntax.section_opens}{syntax.opens}".lstrip()
    mark = first_mark(whole)
    if is_mark(mark) and mark not in _shared_marks(description):
        return mark
    return whole


def _shared_marks(description: DerivedFormat) -> set[str]:
    """First marks of what is no call."""
    marks = description.reasoning
    channels = description.channels
    literals = [*description.wrappers, *description.strays, *description.turn_ends]
    literals += [] if marks is None else [marks.opens]
    literals += [] if channels is None else [channels.answer]
    return {first_mark(literal) for literal in literals}


def named_opening(description: DerivedFormat, name: str) -> str:
    """Opening of an unmarked call up to its arguments, else "".

    The whole opening is needed: an answer may well begin with an object that has a name.
    """
    syntax = description.calls
    channels = description.channels
    text = "" if syntax is None else syntax.body.opening(name)
    if channels is None or not text:
        return text
    return f"{channels.starts}{text}"


def recipient_first(description: DerivedFormat) -> CallSyntax | None:
    """Call syntax with the recipient before the channel, if any."""
    syntax = description.calls
    channels = description.channels
    if syntax is None or channels is None:
        return None
    channel, _, recipient = syntax.opens.partition(" to=")
    if not recipient or syntax.body.parts[0] != NAME:
        return None
    opens = f"{channels.starts} to={recipient}"
    parts = (NAME, f"{channel}{syntax.body.parts[1]}")
    return replace(syntax, opens=opens, body=replace(syntax.body, parts=parts))


def _single(tokens: tuple[int, ...]) -> frozenset[int]:
    """Mark if it is one token; others may begin ambiguously."""
    if len(tokens) == 1:
        return frozenset(tokens)
    return frozenset()
