"""Vocabulary for llguidance: bytes of tokens, tokens of forced text.

llguidance reads a tokenizer.json by the name of its decoder, and only as many ids as it has tokens;
so it gets the bytes of every id.
"""

import json
from collections.abc import Callable
from copy import copy
from functools import cached_property
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper
from msgspec import Struct
from tokenizers import Tokenizer

from mlxstack.text.tokens.pattern_panics import is_panic
from mlxstack.text.tokens.special_tokens import nameless
from mlxstack.text.tokens.token_decoder import TokenDecoder

UNSPELLABLE = "\ufdd0"
"""Noncharacter in the names of tokens that no grammar spells."""
MAX_GREEDY = 64
"""Bytes of the longest token that is looked for in a text that the tokenizer changes."""
Encode = Callable[[str], list[int]]


class VocabularyBytes(Struct, frozen=True):
    """Bytes of the token of each id, b"" for none.

    No text spells those of `special`.
    """

    tokens: tuple[bytes, ...]
    special: tuple[int, ...]
    eos: tuple[int, ...]

    def table(self, encode: Encode | None = None) -> LLTokenizer:
        """llguidance's table of them; without `encode` forced text has the longest tokens."""
        text = ForcedText(self, encode)
        return LLTokenizer(TokenizerWrapper(text), n_vocab=len(self.tokens), eos_token=[*self.eos])


def vocabulary_bytes(tokenizer: Any, n_vocab: int) -> VocabularyBytes:
    """Bytes of a mlx-lm TokenizerWrapper's tokens, of which the model has `n_vocab`."""
    decoder = TokenDecoder(tokenizer)
    special = sorted(token for token in nameless(tokenizer).values() if token < n_vocab)
    tokens = [decoder.of(token) for token in range(n_vocab)]
    for token in special:
        tokens[token] = f"<{UNSPELLABLE}{token}>".encode()
    eos = sorted(token for token in tokenizer.eos_token_ids if token < n_vocab)
    return VocabularyBytes(tuple(tokens), tuple(special), tuple(eos))


class ForcedText:
    """Tokenizer of forced text in the middle of an answer.

    The members without an underscore are those that llguidance reads.
    """

    def __init__(self, vocabulary: VocabularyBytes, encode: Encode | None) -> None:
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = list(vocabulary.special)
        self.eos_token_id = vocabulary.eos[0] if vocabulary.eos else 0
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, data: bytes) -> list[int]:
        """Tokens whose bytes are `data`."""
        if self._encode is not None:
            tokens = self._encode(data.decode(errors="replace"))
            # Some tokenizers change a text: lower case, spaces, letters that they do not know.
            if b"".join(self.tokens[token] for token in tokens if token < len(self.tokens)) == data:
                return tokens
        return self._longest(data)

    def _longest(self, data: bytes) -> list[int]:
        """Longest token at each place, up to bytes without token."""
        tokens: list[int] = []
        offset = 0
        while offset < len(data):
            sizes = range(min(MAX_GREEDY, len(data) - offset), 0, -1)
            size = next((size for size in sizes if data[offset : offset + size] in self._ids), 0)
            if not size:
                break
            tokens.append(self._ids[data[offset : offset + size]])
            offset += size
        return tokens

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        special = frozenset(self.special_token_ids)
        ids = range(len(self.tokens) - 1, -1, -1)
        return {
            self.tokens[token]: token
            for token in ids
            if self.tokens[token] and token not in special
        }


def text_encoder(tokenizer: Any) -> Encode:
    """Function that returns the tokens of a text without marks.

    They are none where the tokenizer gives up.
    """
    backend = Tokenizer.from_str(without_marks(tokenizer))

    def encode(text: str) -> list[int]:
        try:
            ids: list[int] = backend.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            if is_panic(error):
                return []
            raise
        return ids

    return encode


def without_marks(tokenizer: Any) -> str:
    """JSON of a tokenizer whose texts spell no mark.

    Nothing is put before a text. Special tokens would be refused in forced text; grammars mean
    them by number.
    """
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    data: dict[str, Any] = json.loads(backend.to_str())
    model = data["model"]
    names = {text: f"<{UNSPELLABLE}{token}>" for text, token in nameless(tokenizer).items()}
    names.pop(model.get("unk_token"), None)
    for token in data["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): token for piece, token in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), *score] for piece, *score in vocabulary]
    data["post_processor"] = None
    for part in ("normalizer", "pre_tokenizer"):
        data[part] = _without_prefix(data[part])
    return json.dumps(data)


def _without_prefix(part: Any) -> Any:
    """A normalizer or pre-tokenizer that puts nothing before a text."""
    match part:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return {**part, "prepend_scheme": "never"}
        case {"type": "ByteLevel"}:
            return {**part, "add_prefix_space": False}
        case {"type": "Sequence"}:
            (name,) = part.keys() - {"type"}
            inner = [_without_prefix(member) for member in part[name]]
            return {**part, name: [member for member in inner if member is not None]}
    return part
