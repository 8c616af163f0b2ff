# ruff: noqa: T201
"""How often the rule against repetition would stop honest text.

    python -m tests.features.loops.corpus --texts 100000 --tokenizer TOKENIZER.json ... FOLDER ...

Reads the text files of folders (installed packages, documentation), each content once. A text is a
stretch with 2,000 words and numbers, none of which share a token, so of 2,000 tokens at least. A
repetition of tokens is one of bytes too: only files in which bytes repeat are tokenized, and go
through the rule token by token, in whole.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from mlxstack.features.loops.policy import MAX_SHORT, Repetition, RepetitionRule

MIN_TERMS = 2000
MAX_BYTES = 400_000
"""Of a file, so that no folder of long ones is the corpus."""
MIN_EQUAL = MAX_SHORT - MAX_SHORT // 3
"""Tokens, hence bytes, that equal those one period before when the rule ends a text."""
PROBE = 256
"""Bytes of which two equal stretches are looked for: a power of two below `MIN_EQUAL`."""
N_SLOTS = 1 << 20
MULTIPLIER = 6_364_136_223_846_793_005
SKIPPED = (
    ".pyc", ".so", ".gz", ".png", ".jpg", ".whl", ".a", ".o", ".zip", ".safetensors", ".woff2",
)  # fmt: skip


def classes() -> np.ndarray:
    """Kinds of bytes (256,): 1 letters, 2 digits, 0 others."""
    kinds = np.zeros(256, np.uint8)
    kinds[128:] = 1
    for byte in range(128):
        if chr(byte).isalpha():
            kinds[byte] = 1
        elif chr(byte).isdigit():
            kinds[byte] = 2
    return kinds


CLASSES = classes()


def n_terms(text: np.ndarray) -> int:
    """Runs of letters and of digits in bytes (n,)."""
    kinds = CLASSES[text]
    begins = kinds[1:][kinds[1:] != kinds[:-1]]
    return int(np.count_nonzero(begins))


def probe_hashes(text: np.ndarray) -> np.ndarray:
    """Hash of each stretch of PROBE bytes (n - PROBE + 1,)."""
    lanes = np.ndarray((len(text) - 7,), "<u8", text.tobytes(), strides=(1,))
    hashes = lanes * np.uint64(MULTIPLIER) ^ lanes >> np.uint64(31)
    size = 8
    multiplier = MULTIPLIER
    while size < PROBE:
        multiplier = multiplier * multiplier % 2**64
        hashes = hashes[:-size] * np.uint64(multiplier) + hashes[size:]
        size *= 2
    return hashes ^ hashes >> np.uint64(29)


def repeats(text: np.ndarray) -> bool:
    """Whether bytes (n,) repeat, with two and a half copies at least."""
    if len(text) < 2 * PROBE:
        return False
    hashes = probe_hashes(text)
    slots = (hashes >> np.uint64(44)).astype(np.int64) % N_SLOTS
    positions = np.arange(len(hashes), dtype=np.int32)
    last = np.empty(N_SLOTS, np.int32)
    last[slots] = positions
    is_equal = (last[slots] != positions) & (hashes[last[slots]] == hashes)
    if not is_equal.any():
        return False
    ranking = np.argsort(hashes, kind="stable")
    is_same = hashes[ranking[1:]] == hashes[ranking[:-1]]
    periods = np.unique((ranking[1:] - ranking[:-1])[is_same])
    return any(_longest(text, int(period)) >= max(MIN_EQUAL, 1.5 * period) for period in periods)


def _longest(text: np.ndarray, period: int) -> int:
    """Longest run of bytes that equal those one period before."""
    is_equal = np.concatenate(([False], text[period:] == text[:-period], [False]))
    edges = np.flatnonzero(is_equal[1:] != is_equal[:-1])
    return int((edges[1::2] - edges[::2]).max(initial=0))


def longest_runs(tokens: Iterable[int]) -> list[tuple[int, Repetition]]:
    """Repetitions in a text, with the positions of their last tokens."""
    rule = RepetitionRule()
    runs: list[tuple[int, Repetition]] = []
    last: Repetition | None = None
    for position, token in enumerate(tokens):
        repetition = rule.observe(token)
        is_over = repetition is None or (last is not None and repetition.period != last.period)
        if last is not None and is_over:
            runs.append((position - 1, last))
        last = repetition
    if last is not None:
        runs.append((len(rule.tokens) - 1, last))
    return runs


def first_stop(tokens: Iterable[int]) -> tuple[int, Repetition] | None:
    """Position at which the rule ends a text, and the repetition."""
    rule = RepetitionRule()
    for position, token in enumerate(tokens):
        repetition = rule.observe(token)
        if repetition is not None and repetition.is_too_long:
            return position, repetition
    return None


def texts(folders: Sequence[str]) -> Iterator[tuple[Path, bytes]]:
    """Text files, each content once, in a fixed random order."""
    paths = sorted(
        Path(root, name)
        for folder in folders
        for root, _, names in os.walk(folder)
        for name in names
        if not name.endswith(SKIPPED)
    )
    random.Random(1).shuffle(paths)
    contents: set[int] = set()
    for path in paths:
        try:
            if path.is_symlink() or path.stat().st_size < 2 * MIN_TERMS:
                continue
            with path.open("rb") as file:
                text = file.read(MAX_BYTES)
        except OSError:
            continue
        text = text[: text.rfind(b"\n") + 1] or text
        if b"\0" in text or hash(text) in contents or not _is_utf8(text):
            continue
        contents.add(hash(text))
        yield path, text


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def main() -> None:
    """Print each stop, and the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--tokenizer", action="append", default=[])
    parser.add_argument("--runs", action="store_true", help="print long repetitions too")
    options = parser.parse_args()
    tokenizers: list[Any] = [Tokenizer.from_file(path) for path in options.tokenizer]
    n_texts = n_files = n_tokenized = n_stops = 0
    for path, text in texts(options.folders):
        in_bytes = np.frombuffer(text, np.uint8)
        n = n_terms(in_bytes) // MIN_TERMS
        if n == 0:
            continue
        n_texts += n
        n_files += 1
        if n_files % 500 == 0:
            print(
                f"{n_files} files, {n_texts} texts, {n_tokenized} tokenized, {n_stops} stops",
                file=sys.stderr,
                flush=True,
            )
        if repeats(in_bytes):
            n_tokenized += 1
            for name, tokenizer in zip(options.tokenizer, tokenizers, strict=True):
                tokens = tokenizer.encode(text.decode(), add_special_tokens=False).ids
                if options.runs:
                    for end, run in longest_runs(tokens):
                        if run.n_tokens >= max(300, 1.8 * run.period):
                            print(
                                json.dumps(
                                    [
                                        path.suffix,
                                        run.period,
                                        run.n_tokens,
                                        end,
                                        str(path),
                                        name[-40:],
                                    ]
                                ),
                                flush=True,
                            )
                if stop := first_stop(tokens):
                    n_stops += 1
                    print("STOP", path, name, stop, flush=True)
        if n_texts >= options.texts:
            break
    print(f"{n_texts} texts in {n_files} files, {n_tokenized} tokenized, {n_stops} stops")


if __name__ == "__main__":
    main()
