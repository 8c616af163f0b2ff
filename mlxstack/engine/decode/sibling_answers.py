"""Responses to prompts with a common prefix, as drafts."""

from collections import OrderedDict, deque
from collections.abc import Sequence

from mlxstack.core.prompt_tokens import text_tokens
from mlxstack.core.request import Request
from mlxstack.engine.decode.ngram_index import ORDER, Place, extended

HEAD = 128
"""Tokens in which the prompts of siblings agree; shorter prompts have none."""

MAX_BYTES = 8 * 2**20
BYTES_PER_TOKEN = 256
BYTES_PER_PREFIX = 8192
"""More than a remembered token and a beginning take."""


class PrefixAnswers:
    """Latest responses to prompts of one prefix."""

    def __init__(self) -> None:
        self._answers: deque[list[int]] = deque()
        self._places: dict[int, Place] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, tokens: list[int]) -> None:
        """Remember an answer."""
        self._answers.append(tokens)
        for at, gram in _grams(tokens):
            self._places[gram] = Place(tokens, at)

    def drop_oldest(self) -> int:
        """Forget the oldest answer; how many tokens it had."""
        oldest = self._answers.popleft()
        for _, gram in _grams(oldest):
            place = self._places.get(gram)
            if place is not None and place.tokens is oldest:
                del self._places[gram]
        return len(oldest)

    def place(self, gram: int) -> Place | None:
        """The latest place after this n-gram."""
        return self._places.get(gram)


class SiblingAnswers:
    """Responses by tenant and prompt prefix, at most `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._by_prefix: OrderedDict[tuple[str, tuple[int, ...]], PrefixAnswers] = OrderedDict()
        self.n_bytes = 0

    def of(self, request: Request) -> PrefixAnswers | None:
        """Responses to siblings of this request, future ones included."""
        if not request.use_cache or len(request.tokens) < HEAD:
            return None
        key = _key(request)
        answers = self._by_prefix.get(key)
        if answers is None:
            answers = self._by_prefix[key] = PrefixAnswers()
            self.n_bytes += BYTES_PER_PREFIX
        self._by_prefix.move_to_end(key)
        self._shrink()
        return answers

    def remember(self, request: Request, answer: Sequence[int]) -> None:
        """Remember the answer to this request."""
        before = request.tokens[-ORDER:]
        tokens = [*(text_tokens(before) if request.images else before), *answer]
        n_bytes = BYTES_PER_TOKEN * len(tokens)
        if not answer or n_bytes > self._max_bytes:
            return
        answers = self.of(request)
        if answers is not None:
            answers.add(tokens)
            self.n_bytes += n_bytes
            self._shrink()

    def _shrink(self) -> None:
        while self.n_bytes > self._max_bytes:
            key, answers = next(iter(self._by_prefix.items()))
            if answers:
                self.n_bytes -= BYTES_PER_TOKEN * answers.drop_oldest()
            if not answers:
                del self._by_prefix[key]
                self.n_bytes -= BYTES_PER_PREFIX


def _key(request: Request) -> tuple[str, tuple[int, ...]]:
    return request.salt, request.tokens[:HEAD]


def _grams(tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Every place that something follows, and the n-gram before it."""
    grams = []
    gram = 0
    for at, token in enumerate(tokens):
        if at >= ORDER:
            grams.append((at, gram))
        gram = extended(gram, token)
    return grams
