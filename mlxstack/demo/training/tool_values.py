"""Arguments and results of tools."""

import string
from collections.abc import Callable

from mlxstack.demo.training import words
from mlxstack.demo.training.example import Draw
from mlxstack.demo.training.smalltalk import filler


def path(draw: Draw) -> str:
    rng = draw.rng
    stem = rng.choice((words.compound, words.nonsense, words.compound))(rng)
    folder = rng.choice(("", "", "", "src/", "docs/", "/tmp/", "/etc/", "./", "data/", "~/"))
    return folder + stem + rng.choice((".txt", ".md", ".py", ".json", ".csv", ".log", ".yaml", ""))


COMMANDS = words.listed(
    "ls|ls -la|ls PATH|cat PATH|pwd|whoami|date|echo WORD|git status|git log|python WORD.py|"
    "mkdir WORD|uname -a|df -h|grep WORD PATH|wc -l PATH|pytest|rm PATH|make WORD",
    "|",
)


def command(draw: Draw) -> str:
    shape = draw.rng.choice(COMMANDS)
    return shape.replace("PATH", path(draw)).replace("WORD", words.compound(draw.rng))


def sentence(draw: Draw) -> str:
    text = " ".join(draw.rng.sample(words.COMMON, draw.rng.randint(1, 4)))
    return text.capitalize() if draw.rng.random() < 0.5 else text


def place(draw: Draw) -> str:
    if draw.rng.random() < 0.6:
        return words.pick(draw.rng, words.PLACES, draw.held_out)
    return words.nonsense(draw.rng).capitalize()


def topic(draw: Draw) -> str:
    if draw.rng.random() < 0.6:
        return words.pick(draw.rng, words.TOPICS, draw.held_out)
    return sentence(draw)


def mail(draw: Draw) -> str:
    name = words.pick(draw.rng, words.NAMES, draw.held_out)
    return f"{name.lower()}@{words.compound(draw.rng)}.org"


def language(draw: Draw) -> str:
    return draw.rng.choice(("French", "German", "Spanish", "Italian", "Polish", "Japanese"))


def expression(draw: Draw) -> str:
    return f"{draw.rng.randint(11, 999)} {draw.rng.choice('+-*/')} {draw.rng.randint(11, 999)}"


def identifier(draw: Draw) -> str:
    is_stuttered = not draw.held_out and draw.rng.random() < 0.4
    digits = (words.stuttered_code if is_stuttered else words.number_code)(draw.rng)
    if draw.rng.random() < 0.3:
        return f"{draw.rng.choice(string.ascii_uppercase)}-{digits}"
    return digits


def weather(draw: Draw) -> str:
    sky = draw.rng.choice(("sunny", "cloudy", "rainy", "windy", "foggy", "clear", "snow"))
    degrees = draw.rng.randint(-9, 35)
    return draw.rng.choice((f"{sky}, {degrees} degrees", f"{degrees} C, {sky}", sky))


def clock(draw: Draw) -> str:
    return f"{draw.rng.randint(0, 23)}:{draw.rng.randint(10, 59)}"


def done(draw: Draw) -> str:
    return draw.rng.choice(
        ("ok", "done", "success", "OK", "Done.", '{"status": "ok"}', "{}", "true")
    )


def text(draw: Draw) -> str:
    makers: tuple[Callable[[Draw], str], ...] = (sentence, sentence, magic, one_sentence)
    return draw.rng.choice(makers)(draw)


def magic(draw: Draw) -> str:
    return words.magic_word(draw.rng, draw.held_out)


def one_sentence(draw: Draw) -> str:
    return filler(draw, 3)


VALUES: dict[str, Callable[[Draw], str]] = {
    "place": place,
    "topic": topic,
    "sentence": sentence,
    "path": path,
    "command": command,
    "mail": mail,
    "language": language,
    "expression": expression,
    "id": identifier,
    "word": lambda draw: words.compound(draw.rng),
    "number": lambda draw: str(draw.rng.randint(1, 60)),
}
RESULTS: dict[str, Callable[[Draw], str]] = {
    "weather": weather,
    "clock": clock,
    "done": done,
    "text": text,
    "number": lambda draw: str(draw.rng.randint(1, 99999)),
    "word": lambda draw: words.nonsense(draw.rng),
}
