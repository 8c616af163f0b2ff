"""Tokenizer training, so that a word always splits alike."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
IMAGE_TOKENS = {0xC0: "[IMG]", 0xC1: "[IMG_BREAK]", 0xF5: "[IMG_END]"}
"""Tokens of images in place of tokens of bytes that UTF-8 never has."""
N_TOKENS = 1024
N_SPACED_WORDS = 160
JSON_MARKS = r'": [\[{]*"?|"[\]}]+|", "|[\]}]+, "|\{"'
PIECES = JSON_MARKS + r"|\n| +(?!\p{L})|SPACE\p{L}+|\p{N}|[^\s\p{L}\p{N}]|\s"
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "model_max_length": 4096,
    "clean_up_tokenization_spaces": False,
    "add_prefix_space": False,
}


def cutter(space: str) -> pre_tokenizers.PreTokenizer:
    """Cut text into pieces that tokens do not cross; digits and punctuation stand alone."""
    cut = pre_tokenizers.Split(Regex(PIECES.replace("SPACE", space)), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([cut, byte_level])


def spaced_words(texts: list[str], tokenizer: Tokenizer) -> list[str]:
    """The most frequent words behind a space that are one token already."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word for word in text.split(" ")[1:] if word.isalpha() and len(word) > 1)
    vocab = tokenizer.get_vocab()
    return [word for word, _ in counts.most_common() if word in vocab][:N_SPACED_WORDS]


def with_spaced_words(trained: dict[str, Any], spaced: list[str]) -> dict[str, Any]:
    """Let a space join its word, last of all merges: the word's own splits stay as they are."""
    model = trained["model"]
    for word in spaced:
        model["merges"].append(["Ġ", word])
        model["vocab"]["Ġ" + word] = len(model["vocab"])
    return trained


def with_image_tokens(trained: dict[str, Any]) -> dict[str, Any]:
    """Rename tokens that no text has: the vocabulary keeps its size."""
    vocab = trained["model"]["vocab"]
    plain = trained["added_tokens"][0]
    for byte, token in IMAGE_TOKENS.items():
        number = vocab.pop(chr(byte))
        vocab[token] = number
        trained["added_tokens"].append(plain | {"id": number, "content": token})
    trained["model"]["vocab"] = dict(sorted(vocab.items(), key=lambda entry: entry[1]))
    return trained


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    corpus = list(texts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = cutter("")
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=N_TOKENS - N_SPACED_WORDS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    grown = with_spaced_words(json.loads(tokenizer.to_str()), spaced_words(corpus, tokenizer))
    result = Tokenizer.from_str(json.dumps(with_image_tokens(grown)))
    result.pre_tokenizer = cutter(" ?")
    assert result.get_vocab_size() == N_TOKENS, result.get_vocab_size()
    return result


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(TOKENIZER_CONFIG, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text)
