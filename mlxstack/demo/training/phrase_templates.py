"""Phrases with choices, expanded at random."""

import random
import re
from collections.abc import Mapping

from mlxstack.demo.training.words import is_held_out

DROPPED = 0.05
LOWERED = 0.08
OPENED = 0.1
OPENERS = ("Please", "Hey,", "So", "Now", "OK,", "Well,", "And", "Hi,", "Then")
CHOICE = re.compile(r"\(([^()]*)\)")


def split_top(pattern: str) -> list[str]:
    """Cut at the bars that are outside of all parentheses."""
    parts = [""]
    depth = 0
    for char in pattern:
        depth += (char == "(") - (char == ")")
        if char == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return parts


def once(rng: random.Random, pattern: str) -> str:
    text = rng.choice(split_top(pattern))
    while match := CHOICE.search(text):
        option = rng.choice(match[1].split("|"))
        text = text[: match.start()] + option + text[match.end() :]
    return re.sub(r"([.?!])\.$", r"\1", " ".join(text.split(" ")).strip())


def fill(text: str, values: Mapping[str, str]) -> str:
    for key, value in values.items():
        text = text.replace("{" + key + "}", value)
    return text


def expand(rng: random.Random, pattern: str, held_out: bool, values: Mapping[str, str]) -> str:
    """One reading of `pattern`; which readings belong to training is fixed by their text.

    A pattern with too few readings to keep any back gives what it has.
    """
    for _ in range(40):
        text = once(rng, pattern)
        if is_held_out(text) == held_out:
            break
    return fill(text, values)


def loosened(rng: random.Random, text: str) -> str:
    """The way people write: now and then without a word, with one more, or without capitals."""
    parts = [part for part in text.split(" ") if not part.isalpha() or rng.random() > DROPPED]
    loose = " ".join(parts) or text
    if rng.random() < OPENED:
        loose = f"{rng.choice(OPENERS)} {loose}"
    return loose.lower() if rng.random() < LOWERED else loose


def request(rng: random.Random, pattern: str, held_out: bool, values: Mapping[str, str]) -> str:
    """As `expand`, for what a user says; in training, loosely."""
    text = expand(rng, pattern, held_out, {})
    return fill(text if held_out else loosened(rng, text), values)
