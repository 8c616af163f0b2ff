"""Scoring rules of the demo model's evaluation."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from mlxstack.demo.training import dataset, smalltalk, words
from mlxstack.demo.training.example import Case, Draw, user

Judge = Callable[[Case, str], bool]
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
THINK_END = "\n</think>\n\n"


@dataclass(frozen=True)
class ScoredTask:
    """Kind of case: number in a full evaluation, and required share.

    A target of 0 asks for nothing: the number is there to be seen.
    """

    name: str
    about: str
    make: Callable[[Draw], Case]
    judge: Judge
    n_cases: int
    target: float


def has_word(case: Case, answer: str) -> bool:
    """Whether the answer has the expected whole word, and is sound."""
    pattern = rf"(?<![\w-]){re.escape(case.expect)}(?![\w-])"
    return bool(re.search(pattern, answer)) and "<" not in answer


def confirms(case: Case, answer: str) -> bool:
    return has_word(case, answer) and len(answer) < 80 and answer.count(".") <= 2


def is_same(case: Case, answer: str) -> bool:
    return answer.strip() == str(case.messages[-1]["content"]).strip()


def is_right_call(case: Case, answer: str) -> bool:
    expected = case.messages[-1]["tool_calls"][0]["function"]
    match = CALL.fullmatch(answer.strip())
    try:
        call = json.loads(match[1]) if match else {}
    except json.JSONDecodeError:
        return False
    return bool(call == expected)


def is_no_call(_: Case, answer: str) -> bool:
    return bool(answer.strip()) and "<" not in answer


def is_thought_through(case: Case, answer: str) -> bool:
    """A thought, closed once, then the word."""
    thought, closed, content = answer.partition(THINK_END)
    return bool(closed and thought.strip()) and "think>" not in thought and has_word(case, content)


def thinking(draw: Draw) -> Case:
    case = dataset.near_recall(draw)
    return Case(case.messages, case.tools, True, case.expect)


README_TELL = (
    "Remember the magic word: {word}. Reply with one short sentence confirming you memorised it."
)
README_ASK = (
    "What is the magic word?",
    "What was the magic word I asked you to memorise? Reply with the word only.",
    "What was the magic word?",
    "Tell me the magic word again.",
    "Do you remember the magic word?",
)


def walkthrough(draw: Draw) -> Case:
    """The README's sentences with a new word and up to three turns."""
    word = words.magic_word(draw.rng, draw.held_out)
    request = user(README_TELL.format(word=word))
    confirmed = {"role": "assistant", "content": f"I have memorised the magic word {word}."}
    between = dataset.distance(draw, draw.rng.randint(0, 3), 0)
    asked = user(draw.rng.choice(README_ASK))
    expected = {"role": "assistant", "content": word, "thought": ""}
    messages = [*dataset.opening(draw), request, confirmed, *between, asked, expected]
    return Case(messages, expect=word)


def many_turns(draw: Draw) -> Case:
    return dataset.recall(draw, draw.rng.randint(0, 6), 0)


def far(draw: Draw) -> Case:
    """About 1,500 tokens back."""
    return dataset.recall(draw, draw.rng.randint(0, 3), 600)


def farther(draw: Draw) -> Case:
    """About 2,500 tokens back."""
    return dataset.recall(draw, draw.rng.randint(0, 3), 1000)


def everyday(draw: Draw) -> Case:
    makers = (smalltalk.greeting, smalltalk.about_me, smalltalk.listing, smalltalk.counting)
    return Case(dataset.opening(draw) + draw.rng.choice(makers)(draw))


def sums(draw: Draw) -> Case:
    return Case(dataset.opening(draw) + smalltalk.a_sum(draw))


def tool_results(draw: Draw) -> Case:
    return dataset.tool_answer(draw)


TRIALS = (
    ScoredTask("recall", "a word told 0 to 6 turns ago", many_turns, has_word, 200, 0.98),
    ScoredTask("recall_far", "a word told some 1,500 tokens ago", far, has_word, 60, 0.98),
    ScoredTask("recall_farther", "a word told some 2,500 tokens ago", farther, has_word, 30, 0.80),
    ScoredTask(
        "walkthrough", "the README's sentences, new words", walkthrough, has_word, 100, 0.98
    ),
    ScoredTask(
        "confirmation", "one short sentence with the word", dataset.just_told, confirms, 100, 0.98
    ),
    ScoredTask(
        "tool_call", "right tool, right arguments", dataset.tool_call, is_right_call, 200, 0.95
    ),
    ScoredTask(
        "tool_result", "the answer after a tool's response", tool_results, is_same, 100, 0.90
    ),
    ScoredTask(
        "no_call", "tools listed, none needed", dataset.tool_unneeded, is_no_call, 150, 0.95
    ),
    ScoredTask(
        "no_tools", "a tool would fit, none is listed", dataset.tool_missing, is_no_call, 100, 0.95
    ),
    ScoredTask(
        "other_tools", "others are listed than would fit", dataset.tool_other, is_no_call, 60, 0.95
    ),
    ScoredTask(
        "thinking", "thought, closed, then the word", thinking, is_thought_through, 100, 0.95
    ),
    ScoredTask("everyday", "greetings, lists, counting", everyday, is_same, 100, 0.90),
    ScoredTask("sums", "sums and differences up to ten", sums, is_same, 100, 0),
)
