"""Structured output: token masks of a grammar and a thinking budget.

Thoughts are free. The grammar begins where the answer begins; a model that may think or call a
tool first can choose so with its first token. In a free answer the grammar of calls begins at the
mark of each call.
"""

from collections.abc import Callable, Sequence
from enum import Enum, auto

from llguidance import LLMatcher
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.errors import BadRequest
from mlxstack.features.formats.grammar.lazy_calls import CallPosition, CallState, CallTrigger
from mlxstack.text.grammar.compile_messages import error_reason


class ThoughtMarks(Struct, frozen=True):
    """Marks of thoughts, for budgets of all thoughts of a free answer."""

    opens: frozenset[int]
    """Token that opens a thought, where one token does."""
    opening: bytes
    """Text that opens a thought, where several tokens write it; else empty."""
    closing: bytes
    """Text that closes a thought, where several tokens write it; else empty."""
    bytes_of: Callable[[int], bytes]

    @property
    def n_longest(self) -> int:
        """Bytes of the longer text."""
        return max(len(self.opening), len(self.closing))


class ConstraintLayout(Struct, frozen=True):
    """Token sequences around the grammar of an answer.

    `opens` begin a thought, which `closes` ends; `escapes` begin something that no grammar
    rules. `budget` is the most tokens of all thoughts, None for no limit; with `thoughts` it also
    holds for those that a free answer opens later. `eos` may not end an
    answer before its grammar began, unless `may_end`. With `headers` an answer begins with one of
    these; the grammar follows the one that equals `closes`, and none follows another. No sequence
    of `forbidden` is completed where no grammar rules; `before` are the last tokens of the prompt.
    `calls` may come wherever the answer is free. `banned` are tokens that the request forbids.
    """

    n_vocab: int
    eos: frozenset[int] = frozenset()
    is_in_thinking: bool = False
    opens: frozenset[int] = frozenset()
    closes: tuple[int, ...] = ()
    escapes: frozenset[int] = frozenset()
    budget: int | None = None
    thoughts: ThoughtMarks | None = None
    may_end: bool = False
    headers: tuple[tuple[int, ...], ...] = ()
    forbidden: tuple[tuple[int, ...], ...] = ()
    before: tuple[int, ...] = ()
    calls: CallTrigger | None = None
    banned: frozenset[int] = frozenset()


class GrammarConstraint:
    """Constraint of a request, one state per choice; `rules` may be None."""

    def __init__(self, layout: ConstraintLayout, rules: LLMatcher | None = None) -> None:
        self._layout = layout
        self._rules = rules

    @property
    def has_grammar(self) -> bool:
        """Whether the answer has a grammar, which also says where it ends."""
        return self._rules is not None

    def start(self) -> "GrammarState":
        """The state at the first token of an answer."""
        rules = None if self._rules is None else self._rules.deep_copy()
        return GrammarState(self._layout, rules)


class ConstraintPhase(Enum):
    """Phase of an answer."""

    HEADER = auto()
    THINKING = auto()
    BEGINNING = auto()
    RULED = auto()
    FREE = auto()


class GrammarPosition(Struct, frozen=True):
    """Position in an answer, after `n_ruled` tokens of the grammar."""

    layout: ConstraintLayout
    at: ConstraintPhase
    n_thoughts: int
    tail: tuple[int, ...]
    text: bytes
    recent: tuple[int, ...]
    n_ruled: int
    calls: CallPosition | None


class GrammarState:
    """One answer on its way. Used by one thread at a time."""

    def __init__(self, layout: ConstraintLayout, rules: LLMatcher | None) -> None:
        self._layout = layout
        self._rules = rules
        self._at = _first(layout)
        self._n_thoughts = 0
        self._tail: tuple[int, ...] = ()
        self._text = b""
        """End of the answer's bytes, in which marks of thoughts are searched for."""
        self._recent = layout.before
        self._n_recent = max(map(len, layout.forbidden), default=0)
        self._n_ruled = 0
        calls = layout.calls
        self._calls = None if calls is None else CallState(calls, layout.before)

    @property
    def is_ruled(self) -> bool:
        """Whether a grammar alone rules the next token."""
        if self._call is not None:
            return True
        is_free = self._layout.opens or self._layout.escapes
        return self._rules is not None and (
            self._at is ConstraintPhase.RULED
            or (self._at is ConstraintPhase.BEGINNING and not is_free)
        )

    def forced_tokens(self) -> list[int]:
        """Next tokens that the grammar forces, up to a tokenization choice."""
        if self._call is not None:
            return self._call.forced_tokens()
        if self._rules is not None and self.is_ruled:
            return self._rules.compute_ff_tokens()
        return []

    def close_thought(self) -> bool:
        """End the thought as a spent budget does; False outside of one."""
        if self._at is not ConstraintPhase.THINKING or not self._layout.closes:
            return False
        self._layout = replace(self._layout, budget=0)
        return True

    def position(self) -> GrammarPosition:
        """Position to pass to `rewind`."""
        return GrammarPosition(
            self._layout, self._at, self._n_thoughts, self._tail, self._text, self._recent,
            self._n_ruled, None if self._calls is None else self._calls.position(),
        )  # fmt: skip

    def rewind(self, position: object) -> None:
        """Take back the tokens since that position."""
        assert isinstance(position, GrammarPosition)
        if self._rules is not None and self._n_ruled > position.n_ruled:
            self._rules.rollback(self._n_ruled - position.n_ruled)
        self._layout = position.layout
        self._at = position.at
        self._n_thoughts = position.n_thoughts
        self._tail = position.tail
        self._text = position.text
        self._recent = position.recent
        self._n_ruled = position.n_ruled
        if self._calls is not None and position.calls is not None:
            self._calls.rewind(position.calls)

    def mask(self) -> bytes | None:
        """Bit mask of the allowed tokens, lowest first; None: all.

        Raises BadRequest when the request forbids each of them.
        """
        mask = self._mask()
        banned = self._layout.banned
        if mask is not None and banned and not any(_without(mask, banned)):
            raise BadRequest(
                "logit_bias forbids every token that the answer may have here; remove some of "
                "the biases, or change the grammar",
                "logit_bias",
            )
        return mask

    def _mask(self) -> bytes | None:
        if self._call is not None and (mask := self._call.mask()) is not None:
            return mask
        if self._at is ConstraintPhase.HEADER:
            return self._header_mask()
        if self._at is ConstraintPhase.THINKING:
            return self._permitted(self._thinking_mask())
        if self._at is ConstraintPhase.FREE or self._rules is None:
            return self._permitted(None)
        mask = self._rules.compute_bitmask()
        if self._rules.is_error():
            raise BadRequest(f"no answer can follow the grammar: {error_reason(self._rules)}")
        if self._at is ConstraintPhase.BEGINNING:
            return _with(mask, self._layout.opens | self._layout.escapes)
        return mask

    def advance(self, token: int) -> None:
        """Advance by `token`. Raises BadRequest when the grammar forbids it."""
        if self._n_recent:
            self._recent = (*self._recent, token)[-self._n_recent :]
        if self._call is not None:
            self._call.follow(token)
            return
        self._step(token)
        calls = self._layout.calls
        is_free = self._at is ConstraintPhase.FREE
        if (
            calls is not None
            and self._calls is not None
            and (is_free or (calls.is_anywhere and self._at is not ConstraintPhase.RULED))
        ):
            self._calls.watch(token)

    @property
    def _call(self) -> CallState | None:
        """The state of the call at hand; None outside of one."""
        if self._calls is not None and self._calls.is_inside:
            return self._calls
        return None

    def _step(self, token: int) -> None:
        marks = self._layout.thoughts
        if marks is not None and marks.n_longest:
            self._text = self._text[-marks.n_longest :] + marks.bytes_of(token)
        match self._at:
            case ConstraintPhase.HEADER:
                self._open(token)
            case ConstraintPhase.THINKING:
                self._think(token)
            case ConstraintPhase.BEGINNING if token in self._layout.opens:
                self._begin_thought()
            case ConstraintPhase.BEGINNING if token in self._layout.escapes or self._rules is None:
                self._at = ConstraintPhase.FREE
                self._watch_thought(token)
            case ConstraintPhase.BEGINNING | ConstraintPhase.RULED:
                self._at = ConstraintPhase.RULED
                self._follow(token)
            case ConstraintPhase.FREE:
                self._watch_thought(token)

    def _watch_thought(self, token: int) -> None:
        """Begin another thought of a free answer, if `token` opens one."""
        if self._rules is not None:
            return
        calls = self._layout.calls
        marks = self._layout.thoughts
        is_call_mark = calls is not None and token in calls.thoughts
        if is_call_mark or (marks is not None and self._opens(marks, token)):
            self._begin_thought()

    def _opens(self, marks: ThoughtMarks, token: int) -> bool:
        """Whether `token` completes the opening of a thought."""
        return token in marks.opens or (bool(marks.opening) and marks.opening in self._text)

    def _begin_thought(self) -> None:
        self._at = ConstraintPhase.THINKING
        self._tail = ()
        self._text = b""

    def _permitted(self, mask: bytes | None) -> bytes | None:
        """The mask without the tokens that complete a forbidden sequence."""
        recent = self._recent
        forbidden = self._layout.forbidden
        last = frozenset(
            sequence[-1]
            for sequence in forbidden
            if recent[len(recent) - len(sequence) + 1 :] == sequence[:-1]
        )
        if not last:
            return mask
        return _without(mask or b"\xff" * -(-self._layout.n_vocab // 8), last)

    def _follow(self, token: int) -> None:
        assert self._rules is not None
        if not self._rules.consume_token(token):
            raise BadRequest(f"the answer left its grammar: {self._rules.get_error()}")
        self._n_ruled += 1

    def _open(self, token: int) -> None:
        self._tail = (*self._tail, token)
        if self._tail in self._layout.headers:
            is_answer = self._tail == self._layout.closes and self._rules is not None
            self._at = ConstraintPhase.BEGINNING if is_answer else ConstraintPhase.FREE

    def _header_mask(self) -> bytes:
        n = len(self._tail)
        headers = self._layout.headers
        following = {header[n] for header in headers if header[:n] == self._tail}
        return _with(bytes(-(-self._layout.n_vocab // 8)), following)

    def _think(self, token: int) -> None:
        self._n_thoughts += 1
        self._tail = (*self._tail, token)[-len(self._layout.closes) or None :]
        marks = self._layout.thoughts
        is_written = marks is not None and bool(marks.closing) and marks.closing in self._text
        if is_written or self._tail == self._layout.closes:
            self._text = b""
            self._at = ConstraintPhase.FREE if self._rules is None else ConstraintPhase.BEGINNING
            self._layout = _thought(self._layout)

    def _thinking_mask(self) -> bytes | None:
        layout = self._layout
        if layout.closes and layout.budget is not None and self._n_thoughts >= layout.budget:
            return _with(bytes(-(-layout.n_vocab // 8)), {self._next_close()})
        if self._rules is None or layout.may_end:
            return None
        return _without(b"\xff" * -(-layout.n_vocab // 8), layout.eos)

    def _next_close(self) -> int:
        """The token that brings the end of the thought nearer."""
        closes = self._layout.closes
        n = max(n for n in range(len(closes)) if not n or self._tail[-n:] == closes[:n])
        return closes[n]


def _first(layout: ConstraintLayout) -> ConstraintPhase:
    if layout.headers:
        return ConstraintPhase.HEADER
    if layout.is_in_thinking:
        return ConstraintPhase.THINKING
    return ConstraintPhase.BEGINNING


def closed(closes: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether the end `closes` of a thought is among the last `tokens`."""
    n = len(closes)
    return n > 0 and any(
        tuple(tokens[i : i + n]) == tuple(closes) for i in range(len(tokens) - n + 1)
    )


def _thought(layout: ConstraintLayout) -> ConstraintLayout:
    """Layout after the thought that may stand before a grammar."""
    return replace(layout, is_in_thinking=False, opens=frozenset(), may_end=False)


def _with(mask: bytes, tokens: frozenset[int] | set[int]) -> bytes:
    changed = bytearray(mask)
    for token in tokens:
        changed[token // 8] |= 1 << token % 8
    return bytes(changed)


def _without(mask: bytes, tokens: frozenset[int]) -> bytes:
    changed = bytearray(mask)
    for token in tokens:
        changed[token // 8] &= ~(1 << token % 8) & 0xFF
    return bytes(changed)
