"""Pictures of one colored letter each, drawn from a seeded generator."""

import random
from typing import Any

from msgspec import Struct
from PIL import Image, ImageDraw, ImageFont

COLORS = {
    "red": (215, 30, 35),
    "green": (25, 150, 50),
    "blue": (30, 60, 215),
    "yellow": (235, 200, 20),
    "purple": (140, 40, 160),
    "black": (15, 15, 15),
}
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
KEPT_ONE_IN = 6


class Picture(Struct, frozen=True):
    """Image of Pillow, and the words for it."""

    image: Any
    color: str
    letter: str

    @property
    def answer(self) -> str:
        """The sentence to learn."""
        return f"A {self.color} {self.letter}."


def is_held_out(color: str, letter: str) -> bool:
    """Whether training has no such color and letter together."""
    return (7 * list(COLORS).index(color) + LETTERS.index(letter)) % KEPT_ONE_IN == 0


def choice(rng: random.Random, held_out: bool = False) -> tuple[str, str]:
    """A color and a letter from one side of the held-out split."""
    while True:
        color = rng.choice(list(COLORS))
        letter = rng.choice(LETTERS)
        if is_held_out(color, letter) == held_out:
            return color, letter


def picture(
    rng: random.Random, color: str, letter: str, shape: tuple[int, int] = (1, 1)
) -> Picture:
    """A letter somewhere on a light ground, about upright.

    `shape` is width to height.
    """
    width, height = shape
    side = rng.randint(32, 160)
    width = width * side
    height = height * side
    ground = tuple(rng.randint(225, 255) for _ in range(3))
    image = Image.new("RGB", (width, height), ground)
    size = int(min(width, height) * rng.uniform(0.7, 0.95))
    font = ImageFont.load_default(size)
    x = width / 2 + rng.uniform(-0.06, 0.06) * width
    y = height / 2 + rng.uniform(-0.06, 0.06) * height
    shade = tuple(min(255, max(0, value + rng.randint(-25, 25))) for value in COLORS[color])
    stroke = rng.randint(0, size // 25)
    ImageDraw.Draw(image).text(
        (x, y), letter, shade, font, anchor="mm", stroke_width=stroke, stroke_fill=shade
    )
    turned = image.rotate(rng.uniform(-5, 5), Image.Resampling.BILINEAR, fillcolor=ground)
    return Picture(turned, color, letter)
