"""Lazy tool-call grammar of free answers, triggered by a call's opening.

A mark opens a call at once. Without one (Llama 3's bare JSON, the headers of Functionary) text and
call begin alike, so that the grammar waits for the name of an offered tool: until then an object
with a name may be the answer itself, and a header may be that of plain text.
"""

from collections.abc import Callable, Sequence

from llguidance import LLMatcher
from msgspec import Struct


class CallOpening(Struct, frozen=True):
    """Texts that open a call, and the grammar from byte `n_open`.

    `token` is the text where one token is; else `texts` are searched for. `rules` gives the
    grammar, once it is compiled, or None.
    """

    texts: tuple[bytes, ...]
    n_open: int
    rules: Callable[[], LLMatcher | None]
    token: int | None = None


class CallTrigger(Struct, frozen=True):
    """The openings of calls in the answers of one request.

    They are searched for in the `bytes_of` tokens; `encode` gives the tokens of a text that the
    grammar reads before it goes on. `thoughts` are tokens that open a thought, in which a mark is
    only quoted, unless `is_anywhere`. With `is_first` only white space and the tokens `skipped`
    may stand before a call.
    """

    openings: tuple[CallOpening, ...]
    bytes_of: Callable[[int], bytes]
    encode: Callable[[str], list[int]]
    thoughts: frozenset[int] = frozenset()
    is_anywhere: bool = False
    is_first: bool = False
    skipped: frozenset[int] = frozenset()

    @property
    def n_longest(self) -> int:
        """The bytes of the longest opening."""
        return max(len(text) for opening in self.openings for text in opening.texts)


class CallProgress:
    """The grammar of one call, which has read `n_read` tokens."""

    def __init__(self, rules: LLMatcher, n_read: int) -> None:
        self.rules = rules
        self.n_read = n_read


class CallPosition(Struct, frozen=True):
    """A place among the calls of an answer, for `rewind`."""

    n_calls: int
    n_read: int
    is_inside: bool
    recent: bytes


class CallState:
    """State of the calls in one answer. Not thread-safe."""

    def __init__(self, trigger: CallTrigger, before: Sequence[int] = ()) -> None:
        self.is_inside = False
        self._trigger = trigger
        self._calls: list[CallProgress] = []
        self._n_longest = trigger.n_longest
        # The header of a message may have begun in the prompt.
        tail = b"" if trigger.is_first else b"".join(map(trigger.bytes_of, before))
        self._recent = tail[-self._n_longest :]

    def watch(self, token: int) -> None:
        """Begin a call if this token completes an opening."""
        if token in self._trigger.skipped:
            return
        n_before = len(self._recent)
        text = self._recent + self._trigger.bytes_of(token)
        if self._trigger.is_first:
            # The head of the answer; no more of it is needed once no opening fits.
            self._recent = text.lstrip()[: self._n_longest + 1]
        else:
            self._recent = text[-self._n_longest :]
        for opening in self._trigger.openings:
            following = self._after(opening, text, n_before, token)
            if following is not None and self._begin(opening, following):
                return

    def _begin(self, opening: CallOpening, following: str) -> bool:
        """Whether the call's grammar accepts `following`; then the call begins."""
        rules = opening.rules()
        if rules is None:
            return False
        tokens = self._trigger.encode(following) if following else []
        call = CallProgress(rules.deep_copy(), len(tokens))
        if call.rules.try_consume_tokens(tokens) != len(tokens):
            return False
        self._calls.append(call)
        self.is_inside = True
        self._recent = b""
        return True

    def follow(self, token: int) -> None:
        """Go on in a call, whose grammar ends with it."""
        call = self._calls[-1]
        is_followed = call.rules.consume_token(token)
        call.n_read += is_followed
        self.is_inside = is_followed and not call.rules.is_accepting()

    def mask(self) -> bytes | None:
        """Mask of the tokens allowed in a call; None on failure."""
        rules = self._calls[-1].rules
        mask: bytes = rules.compute_bitmask()
        self.is_inside = not rules.is_error()
        if self.is_inside:
            return mask
        return None

    def forced_tokens(self) -> list[int]:
        """Next tokens that a call's grammar forces."""
        tokens: list[int] = self._calls[-1].rules.compute_ff_tokens()
        return tokens

    def position(self) -> CallPosition:
        """Position to pass to `rewind`."""
        n_read = 0
        if self._calls:
            n_read = self._calls[-1].n_read
        return CallPosition(len(self._calls), n_read, self.is_inside, self._recent)

    def rewind(self, position: CallPosition) -> None:
        """Take back the tokens since that position."""
        del self._calls[position.n_calls :]
        if self._calls and (n := self._calls[-1].n_read - position.n_read):
            self._calls[-1].rules.rollback(n)
            self._calls[-1].n_read = position.n_read
        self.is_inside = position.is_inside
        self._recent = position.recent

    def _after(self, opening: CallOpening, text: bytes, n_before: int, token: int) -> str | None:
        """Text for the grammar after this token; None without an opening.

        The first `n_before` bytes of `text` were there before the token.
        """
        if opening.token is not None:
            if token == opening.token:
                return ""
            return None
        for opened in opening.texts:
            if self._trigger.is_first:
                n_space = len(text) - len(text.lstrip())
                start = -1
                if text.startswith(opened, n_space):
                    start = n_space
            else:
                start = text.rfind(opened)
            if start >= 0 and start + len(opened) > n_before:
                try:
                    return text[start + opening.n_open :].decode()
                except UnicodeDecodeError:
                    return None
        return None
