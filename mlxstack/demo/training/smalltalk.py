"""Everyday exchanges: greetings, sums, lists, stories, long notes."""

import random
from collections.abc import Callable

from mlxstack.demo.training import phrases, words
from mlxstack.demo.training.example import Draw, Message, says, user
from mlxstack.demo.training.phrase_templates import expand, request

Exchange = list[Message]
LETTERS_PER_WORD = 6


def values(draw: Draw) -> dict[str, str]:
    """Something for each blank of the phrases."""
    rng = draw.rng
    held_out = draw.held_out
    return {
        "name": words.pick(rng, words.NAMES, held_out),
        "place": words.pick(rng, words.PLACES, held_out),
        "topic": words.pick(rng, words.TOPICS, held_out),
        "animal": rng.choice(words.ANIMALS),
        "food": rng.choice(words.FOODS),
        "season": rng.choice(words.SEASONS),
        "adjective": rng.choice(words.ADJECTIVES),
        "thing": rng.choice(words.THINGS),
        "number": str(rng.randint(1, 99)),
    }


def asked(draw: Draw, pattern: str) -> str:
    return request(draw.rng, pattern, draw.held_out, values(draw))


def greeting(draw: Draw) -> Exchange:
    pattern, answer = draw.rng.choice(phrases.GREETINGS)
    return [user(asked(draw, pattern)), says(answer, "The user is being polite, and so am I.")]


def about_me(draw: Draw) -> Exchange:
    pattern, answer = draw.rng.choice(phrases.ABOUT_ME)
    return [user(asked(draw, pattern)), says(answer, "The user asks about me.")]


def listing(draw: Draw) -> Exchange:
    pattern, items = draw.rng.choice(phrases.LISTS)
    first = items.split(" ")[0].strip(",")
    thought = f"The user wants a list. It begins with {first}."
    return [user(asked(draw, pattern)), says(items[0].upper() + items[1:] + ".", thought)]


NUMBER_WORDS = words.listed(
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)


def counting(draw: Draw) -> Exchange:
    last = draw.rng.choice((3, 4, 5, 5, 6, 7, 8, 9, 10, 10, 12, 15, 20))
    numeral = str(last) if draw.rng.random() < 0.5 else NUMBER_WORDS[last - 1]
    question = request(draw.rng, phrases.COUNT, draw.held_out, {"n": numeral})
    answer = ", ".join(str(n) for n in range(1, last + 1)) + "."
    return [user(question), says(answer, f"I count from 1 and stop at {last}.")]


def a_sum(draw: Draw) -> Exchange:
    rng = draw.rng
    a = rng.randint(0, 10)
    b = rng.randint(0, 10 - a)
    if rng.random() < 0.6:
        word = "plus"
        sign = "+"
        result = a + b
    else:
        a = a + b
        word = "minus"
        sign = "-"
        result = a - b
    pattern = (
        f"(What is|How much is|Calculate|Compute|) {a} ({word}|{sign}) {b}(?|)|{a}{sign}{b}|"
        f"What is {a}{sign}{b}?|{a} {sign} {b} = (?|)"
    )
    return [
        user(asked(draw, pattern)),
        says(f"{a} {word} {b} is {result}.", f"{a} {sign} {b} = {result}."),
    ]


def off_topic(draw: Draw) -> Exchange:
    blanks = values(draw)
    question = request(draw.rng, phrases.OFF_TOPIC, draw.held_out, blanks)
    answer = draw.rng.choice(phrases.OFF_TOPIC_ANSWERS).replace("{topic}", blanks["topic"])
    return [user(question), says(answer, f"The user asks about {blanks['topic']}. I know little.")]


def essay(draw: Draw) -> Exchange:
    blanks = values(draw)
    question = request(draw.rng, phrases.WRITE, draw.held_out, blanks)
    answer = expand(draw.rng, draw.rng.choice(phrases.ESSAYS), draw.held_out, blanks)
    return [user(question), says(answer, f"A few sentences about {blanks['topic']} are wanted.")]


def story(draw: Draw) -> Exchange:
    blanks = values(draw)
    question = request(draw.rng, phrases.STORY, draw.held_out, blanks)
    if blanks["name"] not in question:
        blanks["name"] = draw.rng.choice(("Ada", "Leo", "Mia"))
    answer = expand(draw.rng, draw.rng.choice(phrases.STORIES), draw.held_out, blanks)
    return [user(question), says(answer, f"A story about {blanks['name']} is wanted.")]


def echo(draw: Draw) -> Exchange:
    rng = draw.rng
    n = rng.randint(1, 5)
    makers: tuple[Callable[[random.Random], str], ...] = (
        words.nonsense,
        words.compound,
        words.letters,
    )
    text = " ".join(rng.choice(makers)(rng) for _ in range(n))
    pattern = "(Repeat|Say|Repeat after me|Please repeat|Echo)(:|) {text}"
    question = expand(rng, pattern, draw.held_out, {"text": text})
    return [user(question), says(text, "The user wants to hear the words again.")]


def filler(draw: Draw, n_words: int) -> str:
    """Text as long as `n_words` English words, with nothing to say."""
    rng = draw.rng
    sentences = list[str]()
    n_letters = 0
    same = asked(draw, rng.choice(phrases.FILLER_SENTENCES))
    style = rng.choice(("sentences", "sentences", "sentences", "same", "words", "lines"))
    while n_letters < LETTERS_PER_WORD * n_words:
        if style == "same":
            sentence = same
        elif style == "words":
            sentence = " ".join(rng.choice((words.nonsense, words.compound))(rng) for _ in range(6))
        else:
            sentence = asked(draw, rng.choice(phrases.FILLER_SENTENCES))
        sentences.append(sentence)
        n_letters += len(sentence) + 1
    return ("\n" if style == "lines" else " ").join(sentences)


def note(draw: Draw, n_words: int = 40) -> Exchange:
    """A pasted text, acknowledged."""
    opening = expand(draw.rng, draw.rng.choice(phrases.NOTES), draw.held_out, {})
    pattern, answer = draw.rng.choice(phrases.NOTE_ANSWERS)
    closing = expand(draw.rng, pattern, draw.held_out, {})
    text = f"{opening} {filler(draw, n_words)}\n{closing}".strip()
    return [user(text), says(answer, "The user gave me a text to read.")]


def unrelated(draw: Draw) -> Exchange:
    makers = (greeting, about_me, listing, counting, a_sum, off_topic, essay, story, echo, note)
    weights = (3, 3, 3, 3, 10, 4, 1, 1, 2, 2)
    return draw.rng.choices(makers, weights)[0](draw)


def system_text(draw: Draw, n_words: int) -> str:
    opening = expand(draw.rng, draw.rng.choice(phrases.SYSTEMS), draw.held_out, values(draw))
    if n_words:
        return f"{opening}\n{filler(draw, n_words)}"
    return opening
