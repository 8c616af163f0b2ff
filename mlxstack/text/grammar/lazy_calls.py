"""Grammar of tool calls in a free answer: it begins at the mark that opens a call."""

from collections.abc import Callable

from llguidance import LLMatcher
from msgspec import Struct


class CallTrigger(Struct, frozen=True):
    """The mark that opens a call, and the grammar of what follows it.

    `token` is the mark where one token is; else `mark` is searched for in the `bytes_of` tokens,
    and `encode` gives the tokens of a text that follows it in its last token. `rules` gives the
    grammar, once it is compiled, or None. `thoughts` are tokens that open a thought, in which a
    mark is only quoted, unless `is_anywhere`.
    """

    rules: Callable[[], LLMatcher | None]
    mark: bytes
    token: int | None
    bytes_of: Callable[[int], bytes]
    encode: Callable[[str], list[int]]
    thoughts: frozenset[int] = frozenset()
    is_anywhere: bool = False


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
    """The calls of one answer on its way. Used by one thread at a time."""

    def __init__(self, trigger: CallTrigger) -> None:
        self.is_inside = False
        self._trigger = trigger
        self._calls: list[CallProgress] = []
        self._recent = b""

    def watch(self, token: int) -> None:
        """Begin a call if this token of the free answer completes the mark."""
        rest = self._after_mark(token)
        rules = None if rest is None else self._trigger.rules()
        if rest is None or rules is None:
            return
        tokens = self._trigger.encode(rest) if rest else []
        call = CallProgress(rules.deep_copy(), len(tokens))
        if call.rules.try_consume_tokens(tokens) == len(tokens):
            self._calls.append(call)
            self.is_inside, self._recent = True, b""

    def follow(self, token: int) -> None:
        """Go on in a call, whose grammar ends with it."""
        call = self._calls[-1]
        is_followed = call.rules.consume_token(token)
        call.n_read += is_followed
        self.is_inside = is_followed and not call.rules.is_accepting()

    def mask(self) -> bytes | None:
        """The tokens that may come next in a call; None, and it is free, if that fails."""
        rules = self._calls[-1].rules
        mask: bytes = rules.compute_bitmask()
        self.is_inside = not rules.is_error()
        return mask if self.is_inside else None

    def forced_tokens(self) -> list[int]:
        """The next tokens of a call, as far as its grammar leaves no choice."""
        tokens: list[int] = self._calls[-1].rules.compute_ff_tokens()
        return tokens

    def position(self) -> CallPosition:
        """The place reached."""
        n_read = self._calls[-1].n_read if self._calls else 0
        return CallPosition(len(self._calls), n_read, self.is_inside, self._recent)

    def rewind(self, position: CallPosition) -> None:
        """Take back the tokens since that position."""
        del self._calls[position.n_calls :]
        if self._calls and (n := self._calls[-1].n_read - position.n_read):
            self._calls[-1].rules.rollback(n)
            self._calls[-1].n_read = position.n_read
        self.is_inside, self._recent = position.is_inside, position.recent

    def _after_mark(self, token: int) -> str | None:
        """The text after the mark that this token completes; None if it completes none."""
        trigger = self._trigger
        if trigger.token is not None:
            return "" if token == trigger.token else None
        piece = trigger.bytes_of(token)
        text = self._recent + piece
        self._recent = text[-len(trigger.mark) :]
        at = text.rfind(trigger.mark)
        rest = text[at + len(trigger.mark) :]
        if at < 0 or len(rest) >= len(piece):
            return None
        try:
            return rest.decode()
        except UnicodeDecodeError:
            return None
