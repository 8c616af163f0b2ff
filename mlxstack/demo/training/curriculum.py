"""Training stages and their batches."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from mlxstack.demo.training.copy_task import Sample, copy_sample, tiled_sample
from mlxstack.demo.training.dataset import long_case, short_case
from mlxstack.demo.training.example import Draw
from mlxstack.demo.training.tokenize import render, to_sample
from mlxstack.demo.training.tokenizer import (
    N_TOKENS,
    SPECIAL_TOKENS,
    train_tokenizer,
    write_tokenizer,
)

BATCH_TOKENS = 2048
MAX_TOKENS = 2600
POOL = 160
FIRST_TOKEN_WEIGHT = 4


@dataclass(frozen=True)
class CurriculumStage:
    """Stage of training; `n_far` long dialogues join each pool.

    Half of the steps pretend, by a leap in positions, that up to `most_gap` tokens lie between.
    """

    name: str
    steps: int
    first_rate: float
    last_rate: float
    n_far: int = 0
    far_words: int = 0
    most_gap: int = 0

    def rate(self, step: int) -> float:
        """A short warm-up, then half a cosine."""
        fall = 0.5 + 0.5 * math.cos(math.pi * step / self.steps)
        return min(1.0, (step + 1) / 50) * (
            self.last_rate + fall * (self.first_rate - self.last_rate)
        )


STAGES = (
    CurriculumStage("tiled", 300, 1e-3, 1e-3),
    CurriculumStage("scattered", 800, 1e-3, 1e-3),
    CurriculumStage("talk", 1750, 1e-3, 1e-3, n_far=4, far_words=200),
    CurriculumStage("far", 800, 1.2e-3, 1.2e-3, n_far=4, far_words=600, most_gap=2500),
    CurriculumStage("settle", 2000, 1.2e-3, 3e-4, n_far=4, far_words=1000, most_gap=2500),
    CurriculumStage("choose", 1000, 7e-4, 1e-5, n_far=3, far_words=1000, most_gap=2500),
    CurriculumStage("polish", 2800, 1e-3, 1e-5, n_far=6, far_words=1000, most_gap=2500),
    CurriculumStage("finish", 1800, 1e-3, 1e-5, n_far=5, far_words=1000, most_gap=2500),
    CurriculumStage("ripen", 5000, 1e-3, 1e-5, n_far=14, far_words=1000, most_gap=2500),
    CurriculumStage("round", 4000, 8e-4, 1e-5, n_far=10, far_words=1000, most_gap=2500),
    CurriculumStage("deepen", 3600, 8e-4, 1e-6, n_far=9, far_words=1000, most_gap=2500),
    CurriculumStage("sharpen", 2200, 8e-4, 1e-6, n_far=6, far_words=1000, most_gap=2500),
)


def copy_batches(rng: random.Random, stage: CurriculumStage) -> Iterator[list[Sample]]:
    while True:
        if stage.name == "tiled":
            yield [tiled_sample(rng, 64, N_TOKENS) for _ in range(BATCH_TOKENS // 64)]
        else:
            yield [copy_sample(rng, 256, N_TOKENS) for _ in range(BATCH_TOKENS // 256)]


def talk_batches(
    rng: random.Random, stage: CurriculumStage, tokenizer: Tokenizer
) -> Iterator[list[Sample]]:
    """Batches of dialogues of similar length, in random order."""
    draw = Draw(rng)
    while True:
        cases = [short_case(draw) for _ in range(POOL)]
        cases += [long_case(draw, rng.randint(60, stage.far_words)) for _ in range(stage.n_far)]
        pool = [to_sample(case, tokenizer) for case in cases]
        pool += [copy_sample(rng, 256, N_TOKENS) for _ in range(POOL // 10)]
        pool = sorted((s for s in pool if len(s[0]) <= MAX_TOKENS), key=lambda s: len(s[0]))
        batches: list[list[Sample]] = [[]]
        for sample in pool:
            if batches[-1] and (len(batches[-1]) + 1) * len(sample[0]) > BATCH_TOKENS:
                batches.append([])
            batches[-1].append(sample)
        rng.shuffle(batches)
        yield from batches


def padded(samples: list[Sample]) -> tuple[list[list[int]], list[int]]:
    """Rows of one length, and the flat positions to learn.

    The first token of an answer counts more: it decides between a call and a sentence.
    """
    length = max(len(tokens) for tokens, _ in samples)
    rows = [tokens + [0] * (length - len(tokens)) for tokens, _ in samples]
    places = [
        row * (length - 1) + position - 1
        for row, (_, marks) in enumerate(samples)
        for position, mark in enumerate(marks)
        if mark and position > 0
        for _ in range(1 if marks[position - 1] else FIRST_TOKEN_WEIGHT)
    ]
    return rows, places


def batches_of(
    rng: random.Random, stage: CurriculumStage, tokenizer: Tokenizer
) -> Iterator[list[Sample]]:
    is_copying = stage.name in {"tiled", "scattered"}
    if is_copying:
        return copy_batches(rng, stage)
    return talk_batches(rng, stage, tokenizer)


def make_tokenizer(out: Path, seed: int) -> Tokenizer:
    """The tokenizer in `out`, trained first if it is not there."""
    if not (out / "tokenizer.json").exists():
        draw = Draw(random.Random(seed))
        cases = [short_case(draw) for _ in range(6000)]
        texts = [render(case, len(case.messages), is_prompt=False) for case in cases]
        for token in SPECIAL_TOKENS:
            texts = [text.replace(token, " ") for text in texts]
        write_tokenizer(train_tokenizer(texts), out)
    return Tokenizer.from_file(str(out / "tokenizer.json"))
