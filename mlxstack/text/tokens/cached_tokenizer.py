"""Tokenizer with a cache of known text.

A special token is matched before anything else looks at a text, so the text between two of them
always gives the same tokens, wherever it stands. The text is cut there, and the tokens of each
piece are remembered: a follow-up turn encodes only its new pieces.
"""

import re
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct

from mlxstack.core.errors import BadRequest
from mlxstack.core.prompt_tokens import ImageSpan, PromptTokens
from mlxstack.text.tokens.pattern_panics import refuse_panic
from mlxstack.text.tokens.special_token_escape import ESCAPE_CHAR, unescape
from mlxstack.text.tokens.special_tokens import SpecialTokens

COUNTED_CHARS = 32_768
# Tokens that a part may have more than its share of the whole text, since it is cut anywhere.
MAX_SPLIT = 32
PROBE = "Hello,  wörld!\n\n\tdef f(x):\n    return 'x'  \n 123"


class Prompt(PromptTokens, frozen=True):
    """A text in tokens, and the beginning of the answer to it.

    Its checkpoint positions are the end of system and tools, the ends of the last user and tool
    turns, and the end of the messages before the opening of the answer.
    """

    marked: str = ""
    """The rendering, with guard marks; "" for a prompt that came as tokens."""
    chars: tuple[int, ...] = ()
    """First character of each piece."""
    places: tuple[int, ...] = ()
    """First token of each piece."""
    n_replaced: int = 0
    """Splices in it with other tokens than their text."""
    is_in_thinking: bool = False
    """The answer begins inside a block of thoughts."""
    before: tuple[int, ...] = ()
    """Last tokens, when the answer goes on in the middle of a text, which is the last message."""
    answer_at: tuple[int, int] | None = None
    """Character and token where the answer and its opening begin; None where it cannot come back
    in later prompts as it was sampled."""
    history: bytes = b""
    """Digest of the messages, by which such an answer is known."""

    @property
    def text(self) -> str:
        """The text as people wrote it."""
        return unescape(self.marked)

    @property
    def n_replayed(self) -> int:
        """Number of answers and calls with their sampled tokens."""
        return self.n_replaced - len(self.images)

    def piece_from(self, char: int) -> int:
        """Index of the first piece from `char` on, or their number."""
        return bisect_left(self.chars, char)

    def piece_at(self, char: int) -> int:
        """Index of the piece that holds `char`."""
        return max(0, bisect_right(self.chars, char) - 1)


class Splice(Struct, frozen=True):
    """Tokens for the characters from `start` to `end` of a text.

    Those of an image have its span, whose first token is the first of these.
    """

    start: int
    end: int
    tokens: tuple[int, ...]
    image: ImageSpan | None = None


class TokenCache:
    """LRU cache of tokenized pieces, up to `max_tokens`. Thread-safe."""

    def __init__(self, max_tokens: int) -> None:
        self._max = max_tokens
        self._lock = threading.Lock()
        self._pieces: OrderedDict[str, array[int]] = OrderedDict()
        self.n_tokens = 0

    def get(self, piece: str) -> "array[int] | None":
        """The tokens of `piece`, if they are still known."""
        with self._lock:
            tokens = self._pieces.get(piece)
            if tokens is not None:
                self._pieces.move_to_end(piece)
            return tokens

    def put(self, piece: str, tokens: "array[int]") -> None:
        """Remember, and forget what was not used for longest."""
        with self._lock:
            if piece in self._pieces:
                return
            self._pieces[piece] = tokens
            self.n_tokens += _weight(tokens)
            while self.n_tokens > self._max:
                _, oldest = self._pieces.popitem(last=False)
                self.n_tokens -= _weight(oldest)


def _weight(tokens: "array[int]") -> int:
    """Cache size of a piece; an empty one takes room too."""
    return len(tokens) + 8


class CachedTokenizer:
    """Encodes texts of one tokenizer, a mlx-lm TokenizerWrapper. Thread-safe.

    `prefix` and `suffix` are what the tokenizer puts around a plain text (BOS, EOS).
    `n_scratch` counts the characters that were not known yet, roughly when threads meet.
    """

    def __init__(
        self, tokenizer: Any, special_tokens: SpecialTokens, max_tokens: int = 4_000_000
    ) -> None:
        self.n_scratch = 0
        self.tokenizer = tokenizer
        self.special_tokens = special_tokens
        self._lock = threading.Lock()
        self._cache = TokenCache(max_tokens)
        self._anchors = special_tokens.anchors
        self._backend = self._find_backend()
        self._opening = ""
        self._n_opening = 0
        stops = sorted(special_tokens.anchors | special_tokens.rivals, key=len, reverse=True)
        self._stops = re.compile("|".join(map(re.escape, stops)) or r"(?!)")
        if not self._cuts_safely():
            self._stops = re.compile(r"(?!)")
        self._opening, self._n_opening = self._find_opening()
        self.prefix, self.suffix = self._find_frame()

    def encode(self, text: str, splices: Sequence[Splice] = ()) -> Prompt:
        """Tokens of a rendered text, cut at guard marks, which vanish.

        `splices` are ascending and do not overlap. One that would change the tokens outside of
        it is left out; BadRequest is raised where it is an image.
        """
        cuts = self._cut(text)
        placed = self._kept(text, cuts, splices)
        spliced = {splice.start: splice for splice in placed}
        tokens: list[int] = []
        images: list[ImageSpan] = []
        chars = []
        places = []
        n_replaced = 0
        for start, end in self._segments(text, cuts, placed):
            chars.append(start)
            places.append(len(tokens))
            own = self._segment(text, cuts, start, end)
            splice = spliced.get(start)
            if splice is None or splice.tokens == tuple(own):
                tokens.extend(own)
                continue
            if splice.image is not None:
                images.append(splice.image.moved(len(tokens)))
            tokens.extend(splice.tokens)
            n_replaced += 1
        if len(images) < sum(splice.image is not None for splice in splices):
            raise BadRequest("messages: an image has no place in the prompt", "messages")
        return Prompt(
            tokens=tuple(tokens),
            images=tuple(images),
            marked=text,
            chars=tuple(chars),
            places=tuple(places),
            n_replaced=n_replaced,
        )

    def at_least(self, texts: Iterable[str], enough: int) -> int:
        """Lower bound of the tokens of `texts`, counted until above `enough`."""
        n_tokens = 0
        for text in texts:
            for start in range(0, len(text), COUNTED_CHARS):
                part = text[start : start + COUNTED_CHARS].replace(ESCAPE_CHAR, "")
                n_tokens += max(0, len(self._scratch(part)) - MAX_SPLIT)
                if n_tokens > enough:
                    return n_tokens
        return n_tokens

    def place(self, prompt: Prompt, char: int) -> int:
        """Number of tokens before `char` that no continuation can change."""
        index = prompt.piece_at(char)
        start = prompt.chars[index]
        first = prompt.places[index]
        if char <= start:
            return first
        part = self._piece(prompt.marked[start:char])
        whole = prompt.tokens[first : first + len(part)]
        same = next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), None)
        n_same = min(len(part), len(whole)) if same is None else same
        if char < len(prompt.marked):
            n_same = max(0, n_same - 1)
        return first + n_same

    def exact_place(self, prompt: Prompt, char: int) -> int | None:
        """Number of tokens before `char`; None if a token reaches over it."""
        index = prompt.piece_at(char)
        start = prompt.chars[index]
        first = prompt.places[index]
        if char == len(prompt.marked):
            return len(prompt.tokens)
        if char <= start:
            return first
        stop = len(prompt.marked)
        last = len(prompt.tokens)
        if index + 1 < len(prompt.chars):
            stop = prompt.chars[index + 1]
            last = prompt.places[index + 1]
        left = self._piece(prompt.marked[start:char])
        right = self._piece(ESCAPE_CHAR + prompt.marked[char:stop])
        whole = prompt.tokens[first:last]
        if (*left, *right) == whole:
            return first + len(left)
        return None

    def _kept(self, text: str, cuts: Sequence[int], splices: Sequence[Splice]) -> Sequence[Splice]:
        """Splices at whose edges a cut leaves the tokens unchanged."""
        bad = set()
        edges: dict[int, list[int]] = {}
        for edge in {edge for splice in splices for edge in (splice.start, splice.end)}:
            index = bisect_right(cuts, edge) - 1
            if edge not in (cuts[index], len(text)):
                edges.setdefault(index, []).append(edge)
        for index, inner in edges.items():
            end = cuts[index + 1] if index + 1 < len(cuts) else len(text)
            parts = pairwise([cuts[index], *sorted(inner), end])
            tokens = [t for a, b in parts for t in self._segment(text, cuts, a, b)]
            if tokens != list(self._piece(text[cuts[index] : end])):
                bad.update(inner)
        if not bad:
            return splices
        return self._kept(
            text,
            cuts,
            [splice for splice in splices if not bad.intersection((splice.start, splice.end))],
        )

    def _segments(
        self, text: str, cuts: Sequence[int], splices: Sequence[Splice]
    ) -> list[tuple[int, int]]:
        """The pieces of a text; a splice is one of them."""
        starts = []
        n_read = 0
        for splice in splices:
            stop = bisect_left(cuts, splice.start)
            starts += [*cuts[n_read:stop], splice.start]
            n_read = bisect_left(cuts, splice.end)
            if splice.end < len(text) and cuts[n_read : n_read + 1] != [splice.end]:
                starts.append(splice.end)
        starts = sorted({*starts, *cuts[n_read:]})
        return list(pairwise([*starts, len(text)]))

    def _segment(self, text: str, cuts: Sequence[int], start: int, end: int) -> "array[int]":
        """Part of a text after a cut, or continuing its predecessor."""
        part = text[start:end]
        is_cut = cuts[bisect_right(cuts, start) - 1] == start
        if not is_cut:
            part = ESCAPE_CHAR + part
        return self._piece(part)

    def _cut(self, text: str) -> list[int]:
        cuts = [m.start() for m in self._stops.finditer(text) if m[0] in self._anchors]
        if cuts[:1] == [0]:
            return cuts
        return [0, *cuts]

    def _piece(self, piece: str) -> "array[int]":
        tokens = self._cache.get(piece)
        if tokens is None:
            self.n_scratch += len(piece)
            first, *following = piece.split(ESCAPE_CHAR)
            tokens = array("I", self._scratch(first))
            for part in following:
                tokens.extend(self._scratch(self._opening + part)[self._n_opening :])
            self._cache.put(piece, tokens)
        return tokens

    def _scratch(self, text: str) -> list[int]:
        """Tokens of a text, without the cache.

        Raises BadRequest if the tokenizer gives up.
        """
        if not text:
            return []
        try:
            return self._encoded(text)
        except BaseException as error:
            refuse_panic(error)
            raise

    def _encoded(self, text: str) -> list[int]:
        if self._backend is not None:
            # A batch of one, since `encode` holds the GIL, which stops all other threads.
            (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
            ids: list[int] = encoding.ids
            return ids
        with self._lock:
            return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _find_backend(self) -> Any:
        """Thread-safe Rust tokenizer, where it alone decides the tokens."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        whole = list(self.tokenizer.encode(PROBE * 2, add_special_tokens=False))
        if backend is None or backend.encode(PROBE * 2, add_special_tokens=False).ids != whole:
            return None
        return backend

    def _cuts_safely(self) -> bool:
        """Whether cutting at special tokens leaves a probe's tokens as they are."""
        probe = PROBE + "".join(f"{anchor}{PROBE}" for anchor in sorted(self._anchors)[:64])
        return list(self.encode(probe).tokens) == self._scratch(probe)

    def _find_opening(self) -> tuple[str, int]:
        """Prefix so that a continuation is not tokenized as a beginning.

        Some tokenizers put a space before the first word. After a special token they do not.
        """
        for anchor in sorted(self._anchors):
            alone = self._scratch(anchor)
            followed = self._scratch(anchor + "a")
            if len(alone) == 1 and followed[:1] == alone and followed[1:] != self._scratch("a"):
                return anchor, 1
        return "", 0

    def _find_frame(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        bare = self._scratch("a")
        framed = list(self.tokenizer.encode("a", add_special_tokens=True))
        for start in range(len(framed) - len(bare) + 1):
            if framed[start : start + len(bare)] == bare:
                return tuple(framed[:start]), tuple(framed[start + len(bare) :])
        return (), ()


def common_length(a: str, b: str) -> int:
    """Number of leading characters that two texts share."""
    low = 0
    high = min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a.startswith(b[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
