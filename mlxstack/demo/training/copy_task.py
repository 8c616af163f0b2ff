"""Random tokens that repeat: the lesson that teaches attention to copy."""

import random

Sample = tuple[list[int], list[bool]]
FIRST_PLAIN_TOKEN = 9


def noise(rng: random.Random, count: int, n_tokens: int) -> list[int]:
    return [rng.randrange(FIRST_PLAIN_TOKEN, n_tokens) for _ in range(count)]


def tiled_sample(rng: random.Random, length: int, n_tokens: int) -> Sample:
    """Repeated short piece; all but its first showing is learned."""
    size = rng.randint(4, length // 2)
    piece = noise(rng, size, n_tokens)
    tokens = (piece * (length // size + 1))[:length]
    return tokens, [position >= size for position in range(length)]


def stutter(rng: random.Random, count: int, n_tokens: int) -> list[int]:
    """`count` tokens of which few are different: each has several successors."""
    few = noise(rng, max(2, count // 3), n_tokens)
    return noise(rng, 1, n_tokens) + rng.choices(few, k=count - 1)


def scattered_sample(rng: random.Random, length: int, n_tokens: int) -> Sample:
    """Pieces amid noise that return later, cued by their first token."""
    pieces = [
        rng.choice((noise, noise, stutter))(rng, rng.randint(3, 12), n_tokens)
        for _ in range(max(2, length // 40))
    ]
    tokens: list[int] = []
    marks: list[bool] = []
    seen: set[int] = set()
    while len(tokens) < length:
        which = rng.randrange(len(pieces))
        piece = pieces[which]
        tokens += piece
        marks += [False] + [which in seen] * (len(piece) - 1)
        seen.add(which)
        gap = rng.randint(0, 8)
        tokens += noise(rng, gap, n_tokens)
        marks += [False] * gap
    return tokens[:length], marks[:length]


def copy_sample(rng: random.Random, length: int, n_tokens: int) -> Sample:
    maker = tiled_sample if rng.random() < 0.5 else scattered_sample
    return maker(rng, length, n_tokens)
