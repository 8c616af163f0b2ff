"""Derives reasoning, content and turn marks from the rendering of probes."""

import re

from msgspec import Struct

from mlxstack.features.formats.probe_renderings import (
    CONTENT,
    THOUGHT,
    THOUGHT_FIELDS,
    TWO,
    USER,
    TemplateProbes,
    common_start,
    tokens,
)
from mlxstack.features.formats.syntax import ReasoningMarks, first_mark, is_mark, pieces

_NAME = r"[\w:.▁ -]*(?:think|thought|reason)[\w:.▁ -]*"
_PAIRS = (
    (rf"<({_NAME})>", "</{}>"),
    (rf"\[({_NAME})\]", "[/{}]"),
    (r"<\|START_(THINKING|REASONING)\|>", "<|END_{}|>"),
    (r"<\|((?:begin|start)_of_(?:thought|thinking|reasoning))\|>", "<|{}|>"),
    (r"<\|(inner)_prefix\|>", "<|{}_suffix|>"),
)


class TurnMarks(Struct, frozen=True):
    """The marks around content, and those that end a turn.

    `strays` stand before content only where a thought does.
    """

    wrappers: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    end: str = ""
    strays: tuple[str, ...] = ()


def derive_reasoning(probes: TemplateProbes) -> ReasoningMarks | None:
    """Reasoning marks that the template writes, or else names."""
    return _written_marks(probes) or _opened_marks(probes) or _named_marks(probes)


def derive_turn(probes: TemplateProbes, reasoning: ReasoningMarks | None) -> TurnMarks:
    """The marks around content and after it."""
    turn = probes.turn(CONTENT)
    if turn is None or CONTENT not in turn:
        return TurnMarks()
    before, _, after = turn.partition(CONTENT)
    opens = probes.answer(before).strip()
    if reasoning is not None:
        for mark in (reasoning.opens, reasoning.closes):
            if mark.strip():
                opens = opens.replace(mark.strip(), "")
    cuts = [after.find(eos) for eos in probes.eos if eos in after]
    inside = ""
    if cuts:
        inside = after[: min(cuts)]
    ends = _units(after if not cuts else "")
    if ends and (opening := probes.prompt[common_start(probes.bare, probes.prompt) :].strip()):
        # An answer of several turns, as a model writes it on without a pause.
        ends = (f"{ends[0]}{opening}", *ends)
    # A model may spell what ends its turn, or begins the next one.
    ends = tuple(dict.fromkeys((*ends, *probes.eos, *_next_opening(probes, after))))
    closes = _units(inside)
    opens = opens.strip() if first_mark(opens) and is_mark(first_mark(opens)) else ""
    strays = tuple(mark for mark in _beside_thoughts(probes, reasoning) if mark != opens)
    if not opens:
        return TurnMarks((), (*closes, *ends), after, strays)
    return TurnMarks((opens, *closes), ends, after, strays)


def _beside_thoughts(probes: TemplateProbes, reasoning: ReasoningMarks | None) -> tuple[str, ...]:
    """Marks between a thought and the content after it."""
    for field in THOUGHT_FIELDS if reasoning is not None else ():
        after_thought = (probes.turn(CONTENT, (), **{field: THOUGHT}) or "").partition(THOUGHT)[2]
        before, content, _ = after_thought.partition(CONTENT)
        if content and reasoning is not None:
            return _units(before.replace(reasoning.closes, "", 1))
    return ()


def _next_opening(probes: TemplateProbes, after: str) -> tuple[str, ...]:
    """Mark that opens the turn after an answer, if nothing closes that."""
    turns = [USER, {"role": "assistant", "content": CONTENT}, USER]
    after_content = (probes.text(turns, opens=False) or "").rpartition(CONTENT)[2]
    mark = first_mark(after_content)
    if is_mark(mark) and not after.strip():
        return (mark,)
    return ()


def _units(text: str) -> tuple[str, ...]:
    """Marks in a text, each with text up to its next."""
    groups: list[list[str]] = []
    for piece in pieces(text):
        if groups and piece != groups[-1][0]:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    units = ("".join(group) for group in groups)
    return tuple(dict.fromkeys(unit for unit in units if is_mark(first_mark(unit))))


def _written_marks(probes: TemplateProbes) -> ReasoningMarks | None:
    """Marks that the template writes around a given thought."""
    plain = probes.turn(CONTENT) or ""
    parts = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": CONTENT}]
    turns = [(CONTENT, {field: THOUGHT}) for field in THOUGHT_FIELDS]
    for content, fields in [*turns, (parts, {})]:
        for calls in ((), probes.calls(TWO)):
            turn = probes.turn(content, calls, **fields)
            if turn is None or THOUGHT not in turn:
                continue
            before, _, after = turn.partition(THOUGHT)
            if CONTENT in after:
                after = after[: after.find(CONTENT)]
            if CONTENT in before:
                before = before[before.find(CONTENT) + len(CONTENT) :]
            marks = _around(probes, plain, before, after)
            if marks is not None:
                return marks
    return None


def _around(probes: TemplateProbes, plain: str, before: str, after: str) -> ReasoningMarks | None:
    closing = _closing(after)
    if not closing:
        return None
    n = len(pieces(closing))
    written = pieces(before)
    opened = written[-n:]
    while len(opened) < len(written) and not opened[0].startswith(("<", "[")):
        opened = written[-len(opened) - 1 :]
    opening = _as_written(before, opened)
    if written == pieces(plain.partition(CONTENT)[0]) and not _is_pair(opening, closing):
        return _prompted(probes, before, closing)
    return ReasoningMarks(opening, closing)


def _prompted(probes: TemplateProbes, before: str, closing: str) -> ReasoningMarks:
    """Reasoning marks, the first of which only the prompt writes."""
    opening = probes.prompt[common_start(probes.bare, probes.prompt) :]
    written = opening[common_start(before, opening) :]
    if is_mark(first_mark(written)):
        return ReasoningMarks(written.strip(), closing)
    return ReasoningMarks("", closing, written)


def _closing(after: str) -> str:
    """Closing mark of a thought: the first, up to its next."""
    parts = tokens(after.strip())
    if not parts:
        return ""
    same = [
        index
        for index, part in enumerate(parts[1:], 1)
        if part[:2] == parts[0][:2] or part[:1] == "<"
    ]
    text = after.strip()
    if first_mark(text) == text:
        return text
    first = parts[0]
    if is_mark(first) and (len(parts) == 1 or parts[1].isspace() or is_mark(parts[1])):
        return first
    if is_mark(first):
        # Words between marks belong to the first, with the mark that ends them.
        end = same[0] + 1 if same else len(parts)
        return "".join(parts[:end])
    line = text.split("\n", 1)[0]
    if first[:1] in "<[":
        return line.strip()
    return ""


def _as_written(text: str, last: list[str]) -> str:
    """The end of a text that holds these pieces."""
    start = len(text)
    for piece in reversed(last):
        start = text.rfind(piece, 0, start)
    return text[start:].strip()


def _is_pair(opening: str, closing: str) -> bool:
    return closing.replace("/", "", 1) == opening or closing.replace("END", "START") == opening


def _opened_marks(probes: TemplateProbes) -> ReasoningMarks | None:
    """Mark that opens a prompted answer, named after thinking."""
    opening = probes.prompt[common_start(probes.bare, probes.prompt) :].rstrip()
    mark = re.search(rf"(<{_NAME}>|\[{_NAME}\])$", opening, re.IGNORECASE)
    if mark is None:
        return None
    return ReasoningMarks(mark[0], f"{mark[0][0]}/{mark[0][1:]}")


def _named_marks(probes: TemplateProbes) -> ReasoningMarks | None:
    """Mark pair in template or vocabulary, named after thinking."""
    for pattern, closing in _PAIRS:
        for text in (probes.source, "\n".join(sorted(probes.tokens))):
            for match in re.finditer(pattern, text, re.IGNORECASE):
                closes = closing.format(re.sub("^(?:begin|start)", "end", match[1]))
                if closes in text or closes in probes.source or closes in probes.tokens:
                    return ReasoningMarks(match[0], closes)
    return None
