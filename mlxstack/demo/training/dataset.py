"""Dialogues for training and for the evaluation, drawn from a seeded generator."""

from collections.abc import Callable

from mlxstack.demo.training import recall_task, smalltalk, tool_task, words
from mlxstack.demo.training.example import Case, Draw, Message

Make = Callable[[Draw], Case]


def system(draw: Draw, n_words: int = 0) -> Message:
    return {"role": "system", "content": smalltalk.system_text(draw, n_words)}


def opening(draw: Draw) -> list[Message]:
    """System prompt: often none, often short, seldom longer."""
    chance = draw.rng.random()
    if chance < 0.45:
        return []
    return [system(draw, 0 if chance < 0.85 else draw.rng.randint(10, 60))]


def distance(draw: Draw, n_turns: int, n_words: int) -> list[Message]:
    """Unrelated turns, with a note of `n_words` words unless 0."""
    turns = [smalltalk.unrelated(draw) for _ in range(n_turns)]
    if n_words:
        turns.insert(draw.rng.randint(0, n_turns), smalltalk.note(draw, n_words))
    return [message for turn in turns for message in turn]


def secret(draw: Draw) -> tuple[str, str]:
    """A word and its kind."""
    thing = draw.rng.choice(recall_task.WORD_THINGS)
    if "code" in thing and draw.rng.random() < 0.2:
        return thing, words.number_code(draw.rng)
    return thing, words.magic_word(draw.rng, draw.held_out)


def recall(draw: Draw, n_turns: int, n_words: int) -> Case:
    """Told, then other things, then asked. `expect` is the word."""
    thing, word = secret(draw)
    messages = opening(draw) + distance(draw, draw.rng.choice((0, 0, 0, 1)), 0)
    messages += recall_task.tell(draw, thing, word) + distance(draw, n_turns, n_words)
    if draw.rng.random() < 0.08:
        messages.append(system(draw))
    return Case(messages + recall_task.question(draw, thing, word), expect=word)


def near_recall(draw: Draw) -> Case:
    return recall(draw, draw.rng.choice((0, 0, 1, 1, 2, 3)), 0)


def asked_twice(draw: Draw) -> Case:
    thing, word = secret(draw)
    messages = (
        opening(draw)
        + recall_task.tell(draw, thing, word)
        + recall_task.question(draw, thing, word)
    )
    messages += distance(draw, draw.rng.randint(0, 1), 0)
    return Case(messages + recall_task.question(draw, thing, word), expect=word)


def two_facts(draw: Draw) -> Case:
    """A magic word and a personal fact; either is asked for."""
    telling, asking, value = recall_task.personal(draw)
    thing = draw.rng.choice(recall_task.WORD_THINGS)
    word = words.magic_word(draw.rng, draw.held_out)
    tells = [telling, recall_task.tell(draw, thing, word)]
    draw.rng.shuffle(tells)
    between = distance(draw, draw.rng.randint(0, 2), 0)
    messages = opening(draw) + tells[0] + tells[1] + between
    if draw.rng.random() < 0.5:
        return Case(messages + asking, expect=value)
    return Case(messages + recall_task.question(draw, thing, word), expect=word)


def just_told(draw: Draw) -> Case:
    """Ends with the confirmation."""
    thing, word = secret(draw)
    return Case(opening(draw) + recall_task.tell(draw, thing, word), expect=word)


def chat(draw: Draw) -> Case:
    return Case(opening(draw) + distance(draw, draw.rng.randint(1, 4), 0))


def one_turn(draw: Draw) -> Case:
    return Case(opening(draw) + smalltalk.unrelated(draw))


def shelved(draw: Draw) -> tuple[list[tuple[tool_task.Skill, Message, list[str]]], list[Message]]:
    slot_files = tool_task.slot_file_store(draw, draw.rng.choice((1, 1, 2, 2, 3, 4)))
    return slot_files, [tool for _, tool, _ in slot_files]


def tool_call(draw: Draw) -> Case:
    """Ends with the call."""
    slot_files, listed = shelved(draw)
    messages = opening(draw) + distance(draw, draw.rng.choice((0, 0, 0, 1)), 0)
    messages += tool_task.use(draw, *draw.rng.choice(slot_files))[:2]
    return Case(messages, listed)


def tool_answer(draw: Draw) -> Case:
    """Dialogue that ends with an answer from the tool's result."""
    slot_files, listed = shelved(draw)
    messages = opening(draw) + tool_task.use(draw, *draw.rng.choice(slot_files))
    if draw.rng.random() < 0.4:
        messages += tool_task.use(draw, *draw.rng.choice(slot_files))
    return Case(messages, listed)


def tool_session(draw: Draw) -> Case:
    """Many requests over one list of tools, some without a match."""
    slot_files, listed = shelved(draw)
    skills = [skill for skill, _, _ in slot_files]
    messages = opening(draw)
    for _ in range(draw.rng.randint(3, 6)):
        chance = draw.rng.random()
        if chance < 0.72:
            used = tool_task.use(draw, *draw.rng.choice(slot_files))
            messages += used if draw.rng.random() < 0.3 else used[:2]
        else:
            messages += tool_task.no_fit(draw, skills) if chance < 0.9 else quiet(draw)
    return Case(messages, listed)


def tool_unneeded(draw: Draw) -> Case:
    """Tools are listed, and what the user says needs none of them."""
    _, listed = shelved(draw)
    messages = opening(draw) + distance(draw, draw.rng.choice((0, 0, 1)), 0)
    return Case(messages + quiet(draw), listed)


def tool_missing(draw: Draw) -> Case:
    """No tools at all, and a request that needs one."""
    return Case(opening(draw) + tool_task.no_fit(draw, []))


def tool_other(draw: Draw) -> Case:
    """Tools are listed; the request needs one that is not among them."""
    slot_files, listed = shelved(draw)
    return Case(
        opening(draw) + tool_task.no_fit(draw, [skill for skill, _, _ in slot_files]), listed
    )


def quiet(draw: Draw) -> list[Message]:
    """An exchange that no listed tool could serve."""
    makers = (
        smalltalk.greeting, smalltalk.about_me, smalltalk.listing, smalltalk.counting,
        smalltalk.off_topic, smalltalk.story, smalltalk.echo,
    )  # fmt: skip
    return draw.rng.choice(makers)(draw)


def tool_recall(draw: Draw) -> Case:
    """A magic word amid tools."""
    slot_files, listed = shelved(draw)
    thing = draw.rng.choice(recall_task.WORD_THINGS)
    word = words.magic_word(draw.rng, draw.held_out)
    messages = opening(draw) + recall_task.tell(draw, thing, word)
    if draw.rng.random() < 0.5:
        messages += tool_task.use(draw, *draw.rng.choice(slot_files))
    return Case(messages + recall_task.question(draw, thing, word), listed, expect=word)


SHORT: tuple[tuple[Make, int], ...] = (
    (near_recall, 24),
    (just_told, 18),
    (asked_twice, 2),
    (two_facts, 4),
    (chat, 8),
    (one_turn, 10),
    (tool_session, 58),
    (tool_call, 20),
    (tool_answer, 10),
    (tool_unneeded, 8),
    (tool_missing, 3),
    (tool_other, 12),
    (tool_recall, 4),
)


def short_case(draw: Draw) -> Case:
    """Any dialogue up to 400 tokens, one in six with reasoning."""
    makers, weights = zip(*SHORT, strict=True)
    case: Case = draw.rng.choices(makers, weights)[0](draw)
    thinks = draw.rng.random() < 1 / 6
    return Case(case.messages, case.tools, thinks, case.expect)


def long_case(draw: Draw, n_words: int) -> Case:
    """Recall across about `n_words` words, in turns or in one note."""
    n_turns = draw.rng.randint(0, 6)
    case = recall(draw, n_turns, draw.rng.randint(n_words // 2, n_words))
    return Case(case.messages, thinks=draw.rng.random() < 0.1, expect=case.expect)
