"""Tokenizers of every kind of model, decoder and added tokens, trained on the spot."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import sentencepiece
from mlx_lm.tokenizer_utils import NewlineTokenizer, TokenizerWrapper, load
from msgspec import Struct
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlxstack.demo import MODEL_DIR

SPACE = "\u2581"
WORDS = (
    "def", "x", "Hello", " world", " x", "    return", "\n", "\n\n", "grüße", " é", "日本", "er",
    "the", " the", " .", " n't", "do not", "a", "b", "'s", " 's", "▁", "##", "\t",
)  # fmt: skip
LETTERS = tuple(map(chr, range(33, 127)))
HEXED = tuple(f"<0x{byte:02X}>" for byte in range(256))
MARKS = ("<|end|>", "<think>")
SPM = (decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse())
SPM_STRIPPED = (*SPM, decoders.Strip(" ", 1, 0))


class TokenizerKind(Struct, frozen=True):
    """A tokenizer, and what its text is.

    `reference` decodes a row at once. `is_byte_complete`: it writes every text, and the bytes of
    its tokens are that text.
    """

    tokenizer: Any
    reference: Callable[[list[int]], str]
    n_ids: int
    is_byte_complete: bool = False


def byte_letters() -> dict[int, str]:
    """The library's letter of each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def spelled(text: str) -> str:
    """A text in byte letters."""
    table = byte_letters()
    return "".join(table[byte] for byte in text.encode())


def vocabulary(pieces: Sequence[str]) -> dict[str, int]:
    """Ids of pieces, each once."""
    return {piece: at for at, piece in enumerate(dict.fromkeys(pieces))}


def byte_vocabulary() -> dict[str, int]:
    """All byte letters, words, and the halves of characters."""
    halves = (
        "".join(map(byte_letters().get, half)) for half in (b"\xf0\x9f", b"\xe2\x82\xac \xf0")
    )
    return vocabulary([*byte_letters().values(), *map(spelled, WORDS), *halves])


def spm_vocabulary(*more: str) -> dict[str, int]:
    """Letters and words with SentencePiece's letter of a space."""
    texts = [word.replace(" ", SPACE) for word in WORDS]
    return vocabulary(["<unk>", *more, SPACE, SPACE * 2, "\n", "é", *LETTERS, *texts])


def byte_level(decoder: Any = None, more: Sequence[AddedToken] = (), **parts: Any) -> Tokenizer:
    """Byte-level BPE with the decoder ByteLevel, or another."""
    tokenizer = Tokenizer(models.BPE(byte_vocabulary(), [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel() if decoder is None else decoder
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return with_added(tokenizer, more)


def spm(steps: Sequence[Any], more: Sequence[AddedToken] = ()) -> Tokenizer:
    """BPE with bytes for unknown letters, like SentencePiece's."""
    vocab = spm_vocabulary(*HEXED)
    model = models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, ignore_merges=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Sequence(list(steps))
    return with_added(tokenizer, more)


def metaspace(scheme: str, *, is_unigram: bool = False) -> Tokenizer:
    """Metaspace alone, as converters of T5 and XLM write it."""
    vocab = spm_vocabulary()
    model: Any = models.BPE(vocab, [], unk_token="<unk>", ignore_merges=True)
    if is_unigram:
        model = models.Unigram([(piece, -float(at)) for piece, at in vocab.items()], 0, False)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return with_added(tokenizer)


def plain(decoder: Any, *pieces: str) -> Tokenizer:
    """Whole words, with any decoder or none."""
    texts = [word.strip() for word in WORDS if word.strip()]
    vocab = vocabulary(["[UNK]", *pieces, *texts, *LETTERS, "é", ".", "n't"])
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        tokenizer.decoder = decoder
    return with_added(tokenizer)


def word_piece(prefix: str, *, cleanup: bool) -> Tokenizer:
    """WordPiece; `prefix` begins the rest of a word."""
    letters = [f"{prefix}{letter}" for letter in (*LETTERS, "é", "ing")]
    texts = [word.strip() for word in WORDS if word.strip()]
    vocab = vocabulary(["[UNK]", *letters, *LETTERS, *texts, "do", "not", "n't", "'s"])
    model = models.WordPiece(vocab, unk_token="[UNK]", continuing_subword_prefix=prefix)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=prefix, cleanup=cleanup)
    return with_added(tokenizer)


def with_added(tokenizer: Tokenizer, more: Sequence[AddedToken] = ()) -> Tokenizer:
    """A tokenizer with marks and further added tokens."""
    tokenizer.add_special_tokens([AddedToken(MARKS[0], special=True)])
    tokenizer.add_tokens([AddedToken(MARKS[1], normalized=False), *more])
    return tokenizer


def sparse() -> Tokenizer:
    """Byte letters, and added tokens after a hole of 300 ids."""
    data = json.loads(byte_level().to_str())
    texts = (*MARKS, " brave", " está", "\U0001f642")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    start = len(data["model"]["vocab"]) + 300
    data["added_tokens"] = [
        {"id": start + at, "content": word, "special": word == MARKS[0], **flags}
        for at, word in enumerate(texts)
    ]
    data["model"]["vocab"] |= {word: start + at for at, word in enumerate(texts)}
    return Tokenizer.from_str(json.dumps(data))


def added(*texts: str, normalized: bool = False) -> list[AddedToken]:
    """Words that are no special tokens."""
    return [AddedToken(word, normalized=normalized) for word in texts]


def wrapped(tokenizer: Tokenizer, kind: type[Any] = PreTrainedTokenizerFast) -> TokenizerWrapper:
    """The tokenizer as mlx-lm wraps it."""
    return TokenizerWrapper(kind(tokenizer_object=tokenizer, eos_token=MARKS[0]))


def fast(tokenizer: Tokenizer, *, is_byte_complete: bool = False) -> TokenizerKind:
    """Kind whose text is that of its own decoder."""

    def reference(tokens: list[int]) -> str:
        try:
            return str(tokenizer.decode(tokens, skip_special_tokens=False))
        except BaseException as error:
            # The library's Strip fails at a text that is shorter than what it takes off.
            if type(error).__name__ != "PanicException":
                raise
            hypothesis.reject()

    n_ids = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    return TokenizerKind(wrapped(tokenizer), reference, n_ids, is_byte_complete)


def misnamed(decoder: Any) -> TokenizerKind:
    """Byte letters behind another decoder, or none."""
    right = byte_level(more=added(" brave", "Việt"))
    data = json.loads(right.to_str())
    data["decoder"] = decoder and json.loads(decoder.__getstate__())
    wrong = Tokenizer.from_str(json.dumps(data))
    return TokenizerKind(wrapped(wrong), fast(right).reference, fast(right).n_ids, True)


def lines() -> TokenizerKind:
    """mlx-lm's tokenizer that writes <n> for the end of a line."""
    tokenizer = byte_level(more=added("<n>"))

    def reference(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False)).replace("<n>", "\n")

    wrapper = wrapped(tokenizer, NewlineTokenizer)
    return TokenizerKind(wrapper, reference, fast(tokenizer).n_ids)


def demo() -> TokenizerKind:
    """The tokenizer of the embedded model."""
    backend = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    own = fast(backend)
    return TokenizerKind(load(MODEL_DIR), own.reference, own.n_ids, True)


def sentence_piece(name: str | None, model_type: str) -> TokenizerKind:
    """A tokenizer.model alone, loaded by its class."""
    proto = io.BytesIO()
    symbols = [*MARKS, "\n", *(word.replace(" ", SPACE) for word in WORDS if word.strip("▁\n"))]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox, a b c grüße\n"] * 50),
        model_writer=proto,
        vocab_size=len(symbols) + 300,
        model_type=model_type,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=list(dict.fromkeys(symbols)),
        hard_vocab_limit=False,
        minloglevel=2,
    )
    with TemporaryDirectory() as folder:
        settings = {"eos_token": MARKS[0], **({"tokenizer_class": name} if name else {})}
        (Path(folder) / "tokenizer.model").write_bytes(proto.getvalue())
        (Path(folder) / "config.json").write_text('{"model_type": "llama"}')
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))
        tokenizer = load(Path(folder))

    def reference(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))

    is_complete = name in (None, "LlamaTokenizer", "GemmaTokenizer")
    return TokenizerKind(tokenizer, reference, len(tokenizer), is_complete)


def _kinds() -> Mapping[str, Callable[[], TokenizerKind]]:
    split = pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated")
    cut = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    unigram = models.Unigram([(one, -float(at)) for one, at in byte_vocabulary().items()], None)
    lower = normalizers.Lowercase()
    stripped = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 1)])
    replaced = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("\n\n", "\u00b6")])
    texts = ("▁▁▁", "\n\n\n", "está", "naïve")
    accents = (" está", "Việt", "\U0001f642 ")
    prefixed = pre_tokenizers.ByteLevel(add_prefix_space=True)

    def complete(tokenizer: Tokenizer) -> TokenizerKind:
        return fast(tokenizer, is_byte_complete=True)

    nested = [decoders.Sequence([SPM[0], SPM[1]]), decoders.Sequence([SPM[2]])]
    late = [SPM[1], SPM[2], SPM[0], decoders.Strip(" ", 1, 1)]
    start = [SPM[0], SPM[2], decoders.Replace(Regex("^ +"), "")]
    each = [SPM[0], decoders.Strip(" ", 1, 0)]
    both = [decoders.ByteFallback(), decoders.Metaspace()]
    suffix = [decoders.BPEDecoder("</w>"), decoders.Fuse(), decoders.Strip(" ", 0, 1)]
    ends = ("the</w>", "x</w>", "</w>", "fox", "é</w>")
    return {
        "bytes": lambda: complete(byte_level()),
        "bytes, prefix space": lambda: fast(byte_level(pre_tokenizer=prefixed)),
        "bytes, split": lambda: complete(byte_level(pre_tokenizer=cut)),
        "bytes, unigram": lambda: fast(byte_level(model=unigram)),
        "bytes, added words": lambda: complete(byte_level(None, added(*accents))),
        "bytes, normalized words": lambda: fast(
            byte_level(None, added("Été là", normalized=True), normalizer=lower)
        ),
        "bytes, stripped": lambda: fast(byte_level(stripped)),
        "bytes, replaced": lambda: fast(byte_level(replaced)),
        "bytes behind SentencePiece": lambda: misnamed(decoders.Sequence(list(SPM_STRIPPED))),
        "bytes behind Metaspace": lambda: misnamed(decoders.Metaspace()),
        "bytes behind Fuse": lambda: misnamed(decoders.Fuse()),
        "bytes without decoder": lambda: misnamed(None),
        "bytes, sparse ids": lambda: complete(sparse()),
        "bytes, lines": lines,
        "pieces": lambda: complete(spm(SPM_STRIPPED)),
        "pieces, spaces kept": lambda: complete(spm(SPM)),
        "pieces, added words": lambda: complete(spm(SPM_STRIPPED, added(*texts))),
        "pieces, nested": lambda: complete(spm(nested)),
        "pieces, replaced late": lambda: fast(spm(late)),
        "pieces, expression": lambda: fast(spm(start)),
        "pieces, each stripped": lambda: fast(spm(each)),
        "pieces, bytes and Metaspace": lambda: fast(spm(both)),
        "Metaspace, always": lambda: fast(metaspace("always")),
        "Metaspace, first": lambda: fast(metaspace("first")),
        "Metaspace, never": lambda: fast(metaspace("never")),
        "Metaspace, unigram": lambda: fast(metaspace("always", is_unigram=True)),
        "WordPiece": lambda: fast(word_piece("##", cleanup=True)),
        "WordPiece, spaces kept": lambda: fast(word_piece("##", cleanup=False)),
        "WordPiece, other prefix": lambda: fast(word_piece("@@", cleanup=True)),
        "suffixes": lambda: fast(plain(decoders.BPEDecoder("</w>"), *ends)),
        "suffixes, stripped": lambda: fast(plain(decoders.Sequence(suffix), *ends)),
        "CTC": lambda: fast(plain(decoders.CTC(), "<pad>", "|")),
        "words without decoder": lambda: fast(plain(None)),
        "words, fused": lambda: fast(plain(decoders.Fuse())),
        "model of Llama": lambda: sentence_piece("LlamaTokenizer", "bpe"),
        "model without class": lambda: sentence_piece(None, "bpe"),
        "model of Gemma": lambda: sentence_piece("GemmaTokenizer", "bpe"),
        "model of T5": lambda: sentence_piece("T5Tokenizer", "unigram"),
        "demo": demo,
    }


KINDS = _kinds()


@cache
def kind_of(name: str) -> TokenizerKind:
    """The kind of this name, trained once."""
    return KINDS[name]()


def python_model() -> TokenizerKind:
    """A tokenizer.model read by a class in Python."""
    return sentence_piece("GPTSw3Tokenizer", "bpe")
