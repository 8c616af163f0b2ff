"""Text of tokens one by one, and bytes of each token.

A decoder of tokenizer.json is a chain of steps; each takes a list of strings, at first one for each
token, and gives another. Fuse and ByteLevel make one string of the whole list, and the steps after
them see that string alone. Here a step gets the strings as they come, and gives out those that no
later one can change, so that all that it gives out is the output of the library's step for the
whole list.

The vocabulary says what letters stand for: some conversions name SentencePiece's decoder for a
vocabulary of byte letters.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from mlx_lm.tokenizer_utils import NewlineTokenizer
from tokenizers.decoders import Decoder, Fuse

ANCHOR = "x"
"""A first token, to see the text of another one in the middle of an answer."""
REPLACEMENT = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"
"""SentencePiece's letter for a space."""
SPACES = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
BYTE_LEVEL = {"type": "ByteLevel"}
METASPACE = "Metaspace"
PIECES = {"type": "Sequence", "decoders": [SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}]}
N_CONTEXT = 16
"""Tokens before a window that decide how it is read."""
MAX_WINDOW = 32
"""Tokens of a window."""


def _byte_letters() -> dict[str, int]:
    """GPT-2's table: every byte as a printable character."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(unprintable)}


BYTE_LETTERS = _byte_letters()


class DecoderStep(Protocol):
    """One step on its way through one text."""

    def feed(self, parts: list[str]) -> list[str]:
        """Output for the next strings, without what may still change."""

    def finish(self) -> list[str]:
        """Output that was held back."""

    def inner(self, part: str) -> str | bytes:
        """Output for one string alone, in the middle of a text."""


def decoder_chain(
    spec: Mapping[str, Any] | None, plain: frozenset[str]
) -> tuple[Callable[[], DecoderStep], ...]:
    """Functions that start the steps of a decoder.

    Without a decoder a space stands between tokens. Tokens of `plain` are no letters of bytes.
    """
    if spec is None:
        return (SpaceStep,)
    steps: list[Callable[[], DecoderStep]] = []
    is_whole = False
    for step in _flat(spec):
        kind = step.get("type")
        if kind == "Fuse":
            is_whole = True
            continue
        steps.append(_whole_step(step) if is_whole else _step(step, plain))
        is_whole = is_whole or kind == "ByteLevel"
    return tuple(steps)


def step_kinds(spec: Any) -> frozenset[str]:
    """Types that occur in the JSON of a decoder, pre-tokenizer or normalizer."""
    if isinstance(spec, dict):
        own = {str(spec["type"])} if "type" in spec else set()
        return frozenset(own.union(*map(step_kinds, spec.values())))
    if isinstance(spec, list):
        return frozenset[str]().union(*map(step_kinds, spec))
    return frozenset()


def letters_to_bytes(piece: str) -> bytes:
    """Bytes of a byte-level token; other texts are themselves."""
    if all(letter in BYTE_LETTERS for letter in piece):
        return bytes(BYTE_LETTERS[letter] for letter in piece)
    return piece.encode()


def is_utf8(data: bytes) -> bool:
    """Whether these bytes are a text of their own."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _flat(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if spec.get("type") != "Sequence":
        yield spec
        return
    for inner in spec["decoders"]:
        yield from _flat(inner)


def _step(spec: Mapping[str, Any], plain: frozenset[str]) -> Callable[[], DecoderStep]:
    """Step of a list with one string for each token."""
    create: Callable[[], DecoderStep]
    match spec:
        case {"type": "ByteLevel"}:
            create = partial(ByteLevelStep, plain)
        case {"type": "ByteFallback"}:
            create = ByteFallbackStep
        case {"type": "BPEDecoder", "suffix": suffix}:
            create = partial(SuffixStep, suffix)
        case {"type": "CTC"}:
            create = partial(RepeatStep, _library(spec))
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            create = partial(StripStep, content, start, stop)
        case {"type": "Replace" | "Metaspace" | "WordPiece"}:
            create = partial(TokenStep, _library(spec))
        case _:
            create = partial(HeldStep, _library(spec))
    return create


def _whole_step(spec: Mapping[str, Any]) -> Callable[[], DecoderStep]:
    """Step of a text that is one string already."""
    match spec:
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            return partial(WholeStripStep, content, start, stop)
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if pattern:
            return partial(WholeReplaceStep, pattern, content)
    return partial(HeldStep, _library(spec), is_whole=True)


def _library(spec: Mapping[str, Any]) -> Decoder:
    """The step of the library."""
    # A decoder is pickled as JSON, of whatever type.
    decoder = Fuse()
    decoder.__setstate__(json.dumps(spec).encode())
    return decoder


class TokenStep:
    """Step that looks at one token and at whether it is first."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._n_anchor = len(decoder.decode([ANCHOR]))
        self._is_first = True

    def feed(self, parts: list[str]) -> list[str]:
        if self._is_first and parts:
            self._is_first = False
            return [self._decoder.decode(parts[:1]), *map(self.inner, parts[1:])]
        return [self.inner(part) for part in parts]

    def finish(self) -> list[str]:
        return []

    def inner(self, part: str) -> str:
        """Text of a token that is not the first."""
        return str(self._decoder.decode([ANCHOR, part]))[self._n_anchor :]


class SpaceStep:
    """Puts a space between two tokens, where there is no decoder."""

    def __init__(self) -> None:
        self._is_first = True

    def feed(self, parts: list[str]) -> list[str]:
        texts = [self.inner(part) for part in parts]
        if self._is_first and parts:
            self._is_first = False
            texts[0] = parts[0]
        return texts

    def finish(self) -> list[str]:
        return []

    def inner(self, part: str) -> str:
        """A token after another one."""
        return f" {part}"


class StripStep:
    """Cuts up to `start` and `stop` characters off each token."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop

    def feed(self, parts: list[str]) -> list[str]:
        return [self.inner(part) for part in parts]

    def finish(self) -> list[str]:
        return []

    def inner(self, part: str) -> str:
        """The token without its ends."""
        n_start = min(self._start, len(part) - len(part.lstrip(self._content)))
        n_stop = min(self._stop, len(part) - len(part.rstrip(self._content)))
        return part[n_start : len(part) - n_stop]


class SuffixStep:
    """Makes suffixes spaces, and nothing in the last token."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._held: list[str] = []

    def feed(self, parts: list[str]) -> list[str]:
        """All tokens but the last."""
        parts = [*self._held, *parts]
        self._held = parts[-1:]
        return [self.inner(part) for part in parts[:-1]]

    def finish(self) -> list[str]:
        """The last token."""
        held = self._held
        self._held = []
        return [part.replace(self._suffix, "") for part in held]

    def inner(self, part: str) -> str:
        """A token before another one."""
        return part.replace(self._suffix, " ")


class RepeatStep:
    """CTC: drops padding and tokens that come again at once."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._last: str | None = None

    def feed(self, parts: list[str]) -> list[str]:
        """A string for each token that differs from its predecessor."""
        texts = []
        for part in parts:
            text = "" if part == self._last else self.inner(part)
            self._last = part
            texts += [text] if text else []
        return texts

    def finish(self) -> list[str]:
        return []

    def inner(self, part: str) -> str:
        """Text of a token after another one."""
        return str(self._decoder.decode([part]))


class ByteFallbackStep:
    """Makes characters of bytes in a row.

    One byte that does not fit makes the whole row unknown, so it is held back until its end.
    """

    def __init__(self) -> None:
        self._row = bytearray()

    def feed(self, parts: list[str]) -> list[str]:
        """Complete rows, and tokens that are no bytes."""
        texts = []
        for part in parts:
            if byte := _BYTE.fullmatch(part):
                self._row.append(int(byte[1], 16))
            else:
                texts += [*self.finish(), part]
        return texts

    def finish(self) -> list[str]:
        """The last row."""
        row = bytes(self._row)
        self._row = bytearray()
        if not row:
            return []
        if is_utf8(row):
            return [row.decode()]
        return [REPLACEMENT] * len(row)

    def inner(self, part: str) -> str | bytes:
        """The byte that a token stands for, else the token."""
        byte = _BYTE.fullmatch(part)
        return bytes([int(byte[1], 16)]) if byte else part


class ByteLevelStep:
    """Reads letters as bytes of one text in UTF-8."""

    def __init__(self, plain: frozenset[str]) -> None:
        self._plain = plain
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, parts: list[str]) -> list[str]:
        """All complete characters."""
        return [self._utf8.decode(b"".join(map(self.inner, parts)))]

    def finish(self) -> list[str]:
        """U+FFFD for an incomplete character."""
        return [self._utf8.decode(b"", final=True)]

    def inner(self, part: str) -> bytes:
        """The bytes of a token."""
        if part in self._plain:
            return part.encode()
        return letters_to_bytes(part)


class WholeStripStep:
    """Cuts up to `start` and `stop` characters off the text."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._start = start
        self._stop = stop
        self._held = ""

    def feed(self, parts: list[str]) -> list[str]:
        """The text without what may be its end."""
        text = "".join(parts)
        while self._start and text:
            is_cut = text[0] == self._content
            self._start = self._start - 1 if is_cut else 0
            text = text[is_cut:]
        text = self._held + text
        n_stop = min(self._stop, len(text) - len(text.rstrip(self._content)))
        self._held = text[len(text) - n_stop :]
        return [text[: len(text) - n_stop]]

    def finish(self) -> list[str]:
        """Nothing: the end vanishes."""
        return []

    def inner(self, part: str) -> str:
        """A token in the middle stays as it is."""
        return part


class WholeReplaceStep:
    """Replaces a pattern everywhere in the text."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content
        self._held = ""

    def feed(self, parts: list[str]) -> list[str]:
        """The text without what may be the beginning of a pattern."""
        *done, last = "".join([self._held, *parts]).split(self._pattern)
        lengths = range(min(len(self._pattern) - 1, len(last)), 0, -1)
        n_held = next((n for n in lengths if self._pattern.startswith(last[-n:])), 0)
        self._held = last[len(last) - n_held :]
        return [self._content.join([*done, last[: len(last) - n_held]])]

    def finish(self) -> list[str]:
        """The beginning that no pattern followed."""
        held = self._held
        self._held = ""
        return [held]

    def inner(self, part: str) -> str:
        """A token with the patterns that it holds."""
        return part.replace(self._pattern, self._content)


class HeldStep:
    """Any other step, by the library at the end of the text."""

    def __init__(self, decoder: Decoder, *, is_whole: bool = False) -> None:
        self._decoder = decoder
        self._is_whole = is_whole
        self._parts: list[str] = []

    def feed(self, parts: list[str]) -> list[str]:
        self._parts += parts
        return []

    def finish(self) -> list[str]:
        parts = ["".join(self._parts)] if self._is_whole else self._parts
        self._parts = []
        return [self._decoder.decode(parts)]

    def inner(self, part: str) -> str:
        return part


def fed(steps: Sequence[DecoderStep], parts: list[str]) -> str:
    """Text that becomes certain with these strings."""
    for step in steps:
        if not parts:
            return ""
        parts = step.feed(parts)
    return "".join(parts)


def finished(steps: Sequence[DecoderStep]) -> str:
    """Text that was held back by any of the steps."""
    parts: list[str] = []
    for step in steps:
        parts = [*(step.feed(parts) if parts else []), *step.finish()]
    return "".join(parts)


class Detokenizer(Protocol):
    """Text of one row of tokens.

    All that `push` and `finish` give is the text of the row decoded at once.
    """

    def push(self, token: int) -> str:
        """The text that becomes certain with this token."""

    def finish(self) -> str:
        """The text that was held back, once no token follows."""


class TokenDecoder:
    """Text and bytes of the tokens of a mlx-lm TokenizerWrapper. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        # The tokenizer rebuilds this table at each access.
        added = getattr(tokenizer, "added_tokens_decoder", {})
        contents = [str(getattr(token, "content", token)) for token in added.values()]
        # Such a token is found in a text as it is written, whatever its letters stand for.
        plain = frozenset(content for content in contents if not is_utf8(letters_to_bytes(content)))
        if self._backend is None:
            self._chain = decoder_chain(PIECES, plain)
        else:
            self._chain = decoder_chain(_decoder_spec(self._backend), plain)
        if isinstance(getattr(tokenizer, "_tokenizer", None), NewlineTokenizer):
            self._chain = (*self._chain, lambda: WholeReplaceStep("<n>", "\n"))
        self._steps = tuple(make() for make in self._chain)

    def piece(self, token: int) -> str | None:
        """The token as the vocabulary writes it; None if unknown."""
        piece: str | None
        try:
            if self._backend is not None:
                piece = self._backend.id_to_token(token)
            else:
                piece = self._tokenizer.convert_ids_to_tokens(token)
        except (IndexError, KeyError, OverflowError):
            return None
        return piece

    def of(self, token: int) -> bytes:
        """Bytes of `token` in the middle of a text; b"" if unknown."""
        piece = self.piece(token)
        if piece is None:
            return b""
        data: str | bytes = piece
        for step in self._steps:
            if isinstance(data, str):
                data = step.inner(data)
        return data.encode() if isinstance(data, str) else data

    def text(self, tokens: Iterable[int]) -> str:
        """The text of all these tokens."""
        if self._backend is None:
            return str(self._tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))
        steps = self._new_steps()
        pieces = (self.piece(token) for token in tokens)
        return fed(steps, [piece for piece in pieces if piece is not None]) + finished(steps)

    def stream(self, before: Sequence[int] = ()) -> Detokenizer:
        """The text of tokens after those of `before`."""
        stream: Detokenizer
        if self._backend is None:
            stream = WindowDetokenizer(self)
        else:
            stream = StepDetokenizer(self, self._new_steps())
        if not before:
            return stream
        written = "".join([stream.push(token) for token in before])
        return LaterDetokenizer(stream, self.text(before).removeprefix(written))

    def _new_steps(self) -> tuple[DecoderStep, ...]:
        return tuple(make() for make in self._chain)


class StepDetokenizer:
    """Text of one row of tokens by the steps of the decoder."""

    def __init__(self, decoder: TokenDecoder, steps: Sequence[DecoderStep]) -> None:
        self._decoder = decoder
        self._steps = steps

    def push(self, token: int) -> str:
        """The text that becomes certain with this token."""
        piece = self._decoder.piece(token)
        return "" if piece is None else fed(self._steps, [piece])

    def finish(self) -> str:
        return finished(self._steps)


class WindowDetokenizer:
    """Text of one row of tokens of a tokenizer in Python.

    Its steps are not known. The last tokens are decoded with a few before them; a window ends
    where the text of those few is the end of what was shown.
    """

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder
        self._tokens: list[int] = []
        self._n_context = 0
        self._shown = ""

    def push(self, token: int) -> str:
        """The text that becomes certain with this token."""
        self._tokens.append(token)
        text = self._decoder.text(self._tokens)
        if text.endswith(REPLACEMENT) or not text.startswith(self._shown):
            return ""
        text, self._shown = text[len(self._shown) :], text
        if len(self._tokens) > self._n_context + MAX_WINDOW:
            self._cut()
        return text

    def finish(self) -> str:
        return self._decoder.text(self._tokens).removeprefix(self._shown)

    def _cut(self) -> None:
        context = self._tokens[-N_CONTEXT:]
        text = self._decoder.text(context)
        if text.strip() and self._shown.endswith(text):
            self._tokens = context
            self._n_context = N_CONTEXT
            self._shown = text


class LaterDetokenizer:
    """Text after `held`, which the stream did not give out yet."""

    def __init__(self, stream: Detokenizer, held: str) -> None:
        self._stream = stream
        self._held = held

    def push(self, token: int) -> str:
        """The text that becomes certain with this token."""
        return self._later(self._stream.push(token))

    def finish(self) -> str:
        return self._later(self._stream.finish())

    def _later(self, text: str) -> str:
        if not self._held or not text:
            return text
        held = self._held
        # An incomplete character is shown whole.
        self._held = held[len(text) :] if held.startswith(text) else ""
        return text.removeprefix(held) if not self._held else ""


def _decoder_spec(backend: Any) -> dict[str, Any] | None:
    """JSON of the decoder, or of the one that the vocabulary needs."""
    spec = _state(backend.decoder)
    if "ByteLevel" not in step_kinds(spec) and _has_byte_letters(backend):
        return BYTE_LEVEL
    pre_tokenizer = _state(backend.pre_tokenizer) or {}
    if spec is None and pre_tokenizer.get("type") == METASPACE:
        return pre_tokenizer
    return spec


def _has_byte_letters(backend: Any) -> bool:
    """Whether the letters of the vocabulary stand for bytes."""
    parts = (_state(backend.normalizer), _state(backend.pre_tokenizer))
    if any("ByteLevel" in step_kinds(part) for part in parts):
        return True
    is_whole = all(backend.token_to_id(letter) is not None for letter in BYTE_LETTERS)
    return is_whole and backend.token_to_id(SPACE) is None


def _state(part: Any) -> dict[str, Any] | None:
    """JSON of a part of the tokenizer, None without one."""
    if part is None:
        return None
    state: dict[str, Any] = json.loads(part.__getstate__())
    return state
