# ruff: noqa: T201
"""Answers that real models did not end, as token ids, and which of them are degenerate.

    python -m tests.features.loops.recorded NAME-TEMPERATURE.json ...

Packs files of `tests.features.loops.record` into the file beside this one, and prints counts.

Degenerate is an answer that ends in exact copies of its last tokens: `MIN_COPIES` of them at least,
over `MIN_TOKENS` tokens. All periods are tried one after the other, without the rule's own means.
"""

import gzip
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct

PACKED = Path(__file__).with_name("recorded.json.gz")
MIN_COPIES = 4
MIN_TOKENS = 560


class Recorded(Struct, frozen=True):
    """Prompt and answer of a model, as token ids."""

    model: str
    temperature: float
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Copies(Struct, frozen=True):
    """Exact copies at the end of an answer."""

    start: int
    """Number of the first token of the first copy."""
    period: int


def final_copies(
    answer: Sequence[int], min_copies: int = MIN_COPIES, min_tokens: int = MIN_TOKENS
) -> Copies | None:
    """Copies of the shortest period that an answer ends in."""
    n = len(answer)
    for period in range(1, n // min_copies + 1):
        covered = max(min_copies * period, min_tokens)
        if covered > n:
            return None
        if answer[n - covered : n - period] == answer[n - covered + period :]:
            start = n - covered
            while start > 0 and answer[start - 1] == answer[start - 1 + period]:
                start -= 1
            return Copies(start, period)
    return None


def longest_copies(answer: Sequence[int], period: int) -> int:
    """Most tokens that copies of a period cover anywhere in an answer."""
    tokens = np.array(answer)
    is_equal = np.concatenate(([False], tokens[period:] == tokens[:-period], [False]))
    edges = np.flatnonzero(is_equal[1:] != is_equal[:-1])
    return period + int((edges[1::2] - edges[::2]).max(initial=0))


def recorded() -> Iterator[Recorded]:
    """All packed answers."""
    for group in json.loads(gzip.decompress(PACKED.read_bytes())):
        for prompt, answer in group["answers"]:
            yield Recorded(group["model"], group["temperature"], tuple(prompt), tuple(answer))


def main(files: Sequence[str]) -> None:
    """Pack recorded files."""
    groups = [json.loads(Path(file).read_text()) for file in files]
    text = json.dumps(groups, separators=(",", ":"))
    PACKED.write_bytes(gzip.compress(text.encode(), mtime=0))
    for group in groups:
        n_degenerate = sum(final_copies(answer) is not None for _, answer in group["answers"])
        name = f"{group['model']} at {group['temperature']}"
        print(f"{name}: {n_degenerate} of {len(group['answers'])} are degenerate")


if __name__ == "__main__":
    main(sys.argv[1:])
