"""Words of the training dialogues, and those for evaluation."""

import random
import string
import zlib
from collections.abc import Sequence

HELD_OUT_IN = 16


def listed(text: str, mark: str = " ") -> list[str]:
    return text.split(mark)


COMMON = listed(
    "tutorial demo apple river silver garden window rocket monkey purple winter castle orange "
    "dragon coffee pencil planet forest copper marble thunder ocean paper candle bridge island "
    "mirror tiger music engine bottle sunset pepper velvet lemon shadow crystal meadow pocket "
    "hammer spider butter cloud stone light night green black white happy quick brave model cache "
    "slot stack server client token magic secret hidden golden broken open close summer spring "
    "table chair house mouse horse north south east west fire water earth wind star moon sun rain "
    "snow ice fish bird tree leaf rose test alpha beta gamma delta omega nova zebra panda koala "
    "falcon eagle raven sparrow wolf bear hello world cookie sugar honey bread cheese tomato "
    "onion banana cherry mango papaya guitar piano violin drum dance paint color number letter "
    "word sentence story book page chapter silent loud"
)
NAMES = listed(
    "Ada Ben Clara David Emma Felix Grace Hugo Ida Jonas Klara Leo Mia Noah Olga Paul Quinn Rosa "
    "Sam Tina Ursula Victor Wanda Xaver Yara Zoe Alice Bob Carla Dora Erik Fatima Goran Hanna "
    "Ivan Julia Kurt Laura Marco Nina Oscar Petra Ravi Sara Tom Uma Vera Walter Yusuf Zora Anton "
    "Bella Cyrus Diana Elias Frieda Gustav Helena Igor Jasmin Kenji Lena Milan Nora Omar Priya "
    "Rene Sofia Theo"
)
PLACES = listed(
    "Paris London Berlin Rome Madrid Vienna Oslo Lisbon Prague Dublin Athens Warsaw Helsinki "
    "Brussels Zurich Geneva Munich Hamburg Milan Venice Naples Lyon Porto Krakow Tokyo Kyoto "
    "Osaka Seoul Delhi Mumbai Sydney Perth Auckland Toronto Boston Chicago Denver Seattle Austin "
    "Dallas Lima Bogota Quito Cairo Nairobi Lagos Accra Tunis Dakar Riga Tallinn Vilnius Sofia "
    "Zagreb Belgrade Budapest Malmo Bergen Muscat Manila Ottawa"
)
ANIMALS = listed("cat dog fox owl mouse horse bear wolf raven goat hare frog swan crow")
FOODS = listed("bread|soup|apples|cheese|honey|tea and cake|rice|plums|fish|nuts|pancakes", "|")
SEASONS = listed("spring summer autumn winter")
ADJECTIVES = listed(
    "small large old new red blue green quiet loud slow fast warm cold bright dark heavy light "
    "short long strange simple clear brave gentle"
)
THINGS = listed(
    "house table window lamp clock book bridge garden boat road tower kitchen letter box hat "
    "chair machine door river key map wheel bottle coin picture ladder"
)
TOPICS = listed(
    "cats|dogs|the sea|music|mountains|rain|trains|coffee|football|chess|gardens|books|the moon|"
    "bicycles|bridges|castles|computers|bread|winter|friendship|rivers|clocks|ships|birds|trees|"
    "the city|old maps|horses|painting|dreams|snow|apples|robots|time|history|physics|quantum "
    "theory|the sun|volcanoes|poetry|dinosaurs|the economy|love|school|tea|deserts|islands|"
    "electricity|whales|lightning|caves|flowers|museums",
    "|",
)


def is_held_out(text: str) -> bool:
    """Tell whether `text` is held out of training for evaluation."""
    return zlib.crc32(text.lower().encode()) % HELD_OUT_IN == 0


def pick(rng: random.Random, options: Sequence[str], held_out: bool) -> str:
    """One of `options`, from the training or evaluation half."""
    while True:
        option = rng.choice(options)
        if is_held_out(option) == held_out:
            return option


def nonsense(rng: random.Random) -> str:
    syllables = (
        rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") + rng.choice(["", "", "n", "r", "s"])
        for _ in range(rng.randint(2, 4))
    )
    return "".join(syllables)


def stuttered(rng: random.Random) -> str:
    """Few syllables again and again: to copy it, more than the syllable before must be seen."""
    few = [rng.choice("bdfgklmnprstz") + rng.choice("aeiou") + rng.choice(["", "n"]) for _ in "ab"]
    return "".join(rng.choices([*few, rng.choice(COMMON)], k=rng.randint(3, 5)))


def letters(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(4, 10)))


def compound(rng: random.Random) -> str:
    parts = rng.sample(COMMON, rng.choice((1, 2, 2, 2, 3)))
    return rng.choice(("", "", "", "-", "_")).join(parts)


def with_digits(rng: random.Random) -> str:
    stem = rng.choice((nonsense, letters, compound))(rng)
    digits = "".join(rng.choices(string.digits, k=rng.randint(1, 4)))
    return rng.choice((stem + digits, f"{stem}-{digits}", digits + stem))


def mixed_case(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_letters, k=rng.randint(4, 9)))


def magic_word(rng: random.Random, held_out: bool) -> str:
    """Word that was most likely never seen, and must be copied."""
    while True:
        makers = (nonsense, nonsense, letters, letters, compound, compound, with_digits, mixed_case)
        is_stuttered = not held_out and rng.random() < 0.25
        word = stuttered(rng) if is_stuttered else rng.choice(makers)(rng)
        shape = rng.random()
        if shape < 0.1:
            word = word.capitalize()
        elif shape < 0.15:
            word = word.upper()
        if is_held_out(word) == held_out:
            return word


def stuttered_code(rng: random.Random) -> str:
    """Two or three digits again and again."""
    few = rng.sample(string.digits, rng.choice((2, 3)))
    return "".join(rng.choices(few, k=rng.randint(4, 7)))


def number_code(rng: random.Random) -> str:
    return "".join(rng.choices(string.digits, k=rng.randint(3, 7)))
