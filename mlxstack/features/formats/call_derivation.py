"""Derives tool-call syntax from the rendering of probe calls."""

import re
from collections.abc import Callable
from itertools import dropwhile
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.features.formats.argument_values import object_of
from mlxstack.features.formats.probe_renderings import (
    CONTENT,
    IDS,
    KEYS,
    NAMES,
    TWO,
    TYPED,
    USER,
    VALUES,
    TemplateProbes,
    shared_end,
    shared_length,
    shared_start,
    tokens,
)
from mlxstack.features.formats.reasoning_derivation import TurnMarks
from mlxstack.features.formats.syntax import (
    ARGUMENTS,
    COUNT,
    ID,
    INDEX,
    KEY,
    NAME,
    TYPE,
    CallBody,
    CallSyntax,
    JsonBody,
    NamedBody,
    PythonBody,
    ReasoningMarks,
    TaggedBody,
)

MIN_PROSE = 60
"""Least characters of a text of the prompt; marks are shorter."""

_SCALAR = {
    "integer": r"73519", "number": r"73\.5", "boolean": r"[Tt]rue", "array": r"\[",
    "object": r"\{", "null": r"null|None",
}  # fmt: skip
_SIGNS = re.compile(r'\\.|["\[\]{}]', re.DOTALL)


class WrittenCall(Struct, frozen=True):
    """Call in a rendered template: start, end and body."""

    start: int
    end: int
    body: CallBody


def derive_calls(
    probes: TemplateProbes, turn: TurnMarks, reasoning: ReasoningMarks | None
) -> CallSyntax | None:
    """Call syntax of a template; None for an unknown one."""
    text = _one_call(probes)
    if text is None:
        return None
    written = _written(probes, text, 0)
    if written is None:
        return None
    opens = _outside(_before(probes, text[: written.start], reasoning), turn)
    closes = _after(probes, text[written.end :], turn)
    two = probes.turn("", probes.calls(TWO, TWO)) or ""
    match written.body:
        case PythonBody(is_list=True):
            between = ", "
        case PythonBody():
            call = re.search(rf"{NAMES[0]}\([^()]*\)(.*?){NAMES[1]}\(", two, re.DOTALL)
            between = "\n" if call is None else call[1]
        case JsonBody(is_list=True):
            between = _list_between(two) or ", "
            opens = _counted(tokens(opens), two)
        case body:
            return _framed(probes, CallSyntax(body, opens=opens, closes=closes), two, turn)
    return CallSyntax(written.body, opens=opens, closes=closes, between=between)


def _one_call(probes: TemplateProbes) -> str | None:
    """Turn with one call, with arguments as object or text."""
    for as_text in (False, True):
        for content in ("", None):
            probes.arguments_as_text = as_text
            probes.no_content = content
            text = probes.turn("", probes.calls(TWO))
            if text is not None and NAMES[0] in text and VALUES[0] in text:
                return text
    return None


def _framed(probes: TemplateProbes, alone: CallSyntax, two: str, turn: TurnMarks) -> CallSyntax:
    """Syntax with the marks of all calls apart from those of each."""
    before = tokens(alone.opens)
    first = _written(probes, two, 0)
    second = _written(probes, two, 1)
    if first is None or second is None:
        return alone
    middle = tokens(two[first.end : second.start])
    # A template may close its section only after several calls.
    after = tokens(_after(probes, two[second.end :], turn))
    opens = list(dropwhile(str.isspace, shared_end(before, middle)))
    middle = middle[: len(middle) - len(opens)]
    closes = list(dropwhile(str.isspace, shared_start(after, middle)[::-1]))[::-1]
    between = middle[len(closes) :]
    section = before[: len(before) - len(opens)]
    ending = after[len(closes) :]
    n_shared = _shared_mark(opens, ending)
    return CallSyntax(
        alone.body,
        section_opens=_marks(section + opens[:n_shared]),
        section_closes=_marks(ending[n_shared:]),
        opens="".join(opens[n_shared:]),
        closes="".join(closes + opens[:n_shared]),
        between="".join(between),
    )


def _marks(literal: list[str]) -> str:
    """Text of a literal; "" if it is white space."""
    if "".join(literal).strip():
        return "".join(literal)
    return ""


def _written(probes: TemplateProbes, text: str, number: int) -> WrittenCall | None:
    """The call of this number in a turn."""
    name = text.find(NAMES[number])
    if name < 0:
        return None
    return (
        _json(text, name, number)
        or _python(probes, text, name)
        or _named(text, name, number)
        or _tagged(probes, text, name)
    )


def _json(text: str, name: int, number: int) -> WrittenCall | None:
    """A call as an object, or in a list of objects."""
    for match in re.finditer(r"[\[{]", text[:name]):
        start = match.start()
        end = _json_end(text, start)
        if end <= name:
            continue
        try:
            value = object_of(text[start:end])
        except ValueError:
            continue
        item = value[0] if isinstance(value, list) and value else value
        body = _json_body(item, number) if isinstance(item, dict) else None
        if body is None:
            continue
        if not isinstance(value, list):
            return WrittenCall(start, end, replace(body, parts=_parts(text[start:end], number)))
        inner = text.index("{", start)
        listed = replace(
            body,
            parts=_parts(text[inner : _json_end(text, inner)], 0),
            is_list=True,
            list_opens=text[start:inner],
            list_closes=text[text.rindex("}", 0, end) + 1 : end],
        )
        return WrittenCall(start, end, listed)
    return None


def _json_body(item: dict[str, Any], number: int) -> JsonBody | None:
    """JSON paths of name, arguments and id in a call."""
    if NAMES[number] in item:
        return JsonBody((), (), (NAMES[number],))
    name = _path(item, lambda value: value == NAMES[number])
    arguments = _path(item, _is_arguments)
    if name is None or arguments is None:
        return None
    id_path = _path(item, lambda value: value == IDS[number])
    ids = [key for key, value in item.items() if "id" in key and isinstance(value, int | str)]
    return JsonBody((), name, arguments, id_path or tuple(ids[:1]))


def _path(item: dict[str, Any], is_it: Callable[[Any], bool]) -> tuple[str, ...] | None:
    """Path of the first value of a kind; None without one."""
    for key, value in item.items():
        if is_it(value):
            return (key,)
        if isinstance(value, dict) and (inner := _path(value, is_it)) is not None:
            return (key, *inner)
    return None


def _is_arguments(value: Any) -> bool:
    return value == TWO or (isinstance(value, str) and VALUES[0] in value)


def _json_end(text: str, start: int) -> int:
    """End of the JSON value at a position; -1 without one."""
    depth = 0
    is_text = False
    for match in _SIGNS.finditer(text, start):
        sign = match[0]
        if sign == '"':
            is_text = not is_text
        elif not is_text and sign in "[]{}":
            depth += 1 if sign in "[{" else -1
            if depth == 0:
                return match.end()
    return -1


def _parts(text: str, number: int) -> tuple[str, ...]:
    """The literals and slots of a call written as JSON."""
    opening = text.rfind("{", 0, text.find(KEYS[0]))
    end = _json_end(text, opening)
    quoted = text[max(0, opening - 1)] == '"' and text[end : end + 1] == '"'
    marked = text[: opening - quoted] + ARGUMENTS + text[end + quoted :]
    marked = re.sub(r'("[a-z_]*id": ?")\d+(")', rf"\g<1>{IDS[number]}\2", marked)
    return _with_slots(marked, {NAMES[number]: NAME, IDS[number]: ID, ARGUMENTS: ARGUMENTS})


def _with_slots(text: str, slots: dict[str, str]) -> tuple[str, ...]:
    """Parts of a text, with slots in place of some."""
    parts = re.split(f"({'|'.join(map(re.escape, slots))})", text)
    return tuple(slots.get(part, part) for part in parts if part)


def _python(probes: TemplateProbes, text: str, name: int) -> WrittenCall | None:
    """Python calls, in a list or between marks."""
    call = re.compile(rf"{NAMES[0]}\(\s*{KEYS[0]}\s*=[^()]*\)").match(text, name)
    if call is None:
        return None
    start = text.rfind("[", 0, name)
    end = text.find("]", name) + 1
    typed = probes.turn("", probes.calls({"key_integer": TYPED["integer"]})) or ""
    is_list = start >= 0 and end > 0 and not text[start + 1 : name].strip()
    body = PythonBody(
        is_list=is_list,
        has_bare_text=re.search(rf"{KEYS[0]}\s*=\s*{VALUES[0]}", call[0]) is not None,
        has_quoted_values=re.search(rf"[\"']{TYPED['integer']}[\"']", typed) is not None,
    )
    if is_list:
        return WrittenCall(start, end, body)
    return WrittenCall(name, call.end(), body)


def _named(text: str, name: int, number: int) -> WrittenCall | None:
    """A name, then the arguments as JSON."""
    key = text.find(f'"{KEYS[0]}"', name)
    opening = -1
    if key >= 0:
        opening = text.rfind("{", name, key)
    end = -1
    if opening >= 0:
        end = _json_end(text, opening)
    if end < 0 or VALUES[1] not in text[opening:end]:
        return None
    if text.find(NAMES[1 - number], name, opening) >= 0:
        return None
    start, before = _id_before(text, name, number)
    parts = _head_parts(text[name + len(NAMES[number]) : opening], number)
    return WrittenCall(start, end, NamedBody((*before, NAME, *parts)))


def _id_before(text: str, name: int, number: int) -> tuple[int, tuple[str, ...]]:
    """Start of a call with a leading id, and its parts."""
    start = text.rfind(IDS[number], 0, name)
    between = text[start + len(IDS[number]) : name]
    if start < 0 or any(probe in between for probe in (*NAMES, *VALUES)):
        return name, ()
    return start, (ID, between)


def _head_parts(text: str, number: int) -> tuple[str, ...]:
    """The literals and slots after a name."""
    # A name may stand in a header and in the call itself.
    slots = _with_slots(text, {IDS[number]: ID, NAMES[number]: NAME})
    if not slots:
        return ()
    # Calls are counted from 0 or from 1.
    index = re.search(rf"(?<=\W)(?:{number}|{number + 1})(?=\W|$)", slots[0])
    if index is None:
        return slots
    around = (slots[0][: index.start()], INDEX, slots[0][index.end() :])
    return (*(part for part in around if part), *slots[1:])


def _tagged(probes: TemplateProbes, text: str, name: int) -> WrittenCall | None:
    """A name, then a pair of tags for each argument."""
    places = [text.find(probe, name) for probe in (KEYS[0], VALUES[0], KEYS[1], VALUES[1])]
    if -1 in places or sorted(places) != places:
        return None
    key, value, second, last = places
    number = 1
    if text.startswith(NAMES[0], name):
        number = 0
    head = text[name + len(NAMES[number]) : key]
    value_opens = text[key + len(KEYS[0]) : value]
    between = text[value + len(VALUES[0]) : second].replace(KEYS[0], KEY)
    after = text[last + len(VALUES[1]) :].replace(KEYS[1], KEY, 1)
    has_json = value_opens.endswith('"') and between[:1] == after[:1] == '"'
    if has_json:
        value_opens = value_opens[:-1]
        between = between[1:]
        after = after[1:]
    argument_opens = shared_end(tokens(head), tokens(between))
    closing = tokens(between)[: len(tokens(between)) - len(argument_opens)]
    closes = shared_start(closing, tokens(after))
    n_shared = _shared_mark(argument_opens, tokens(after)[len(closes) :])
    opening = "".join(argument_opens[n_shared:])
    value_closes = "".join(closes + argument_opens[:n_shared]).rstrip()
    has_tags = opening.strip() and value_closes.strip()
    if not value_opens.strip() or not (has_json or has_tags):
        return None
    item = "" if has_json else _item(probes, opening, value_opens, value_closes)
    opens, types = (value_opens, ()) if item else _types(probes, value_opens)
    start, before = _id_before(text, name, number)
    body = TaggedBody(
        (*before, NAME, *_head_parts(head[: len(head) - len(opening)], 0)),
        argument_opens=opening,
        value_opens=opens,
        value_closes=value_closes,
        types=types,
        has_json_text=has_json,
        item=item,
    )
    ending = value_closes.replace(KEY, KEYS[1])
    end = text.find(ending, last + len(VALUES[1]) + has_json) + len(ending)
    return WrittenCall(start, end, body)


def _item(probes: TemplateProbes, opens: str, value_opens: str, closes: str) -> str:
    """Name of list item tags, if values are nested tags."""
    member = f"{opens}key_in{value_opens}value_in{closes.replace(KEY, 'key_in')}"
    listed = probes.turn("", probes.calls({"key_array": ["item_one"]})) or ""
    nested = probes.turn("", probes.calls({"key_object": {"key_in": "value_in"}})) or ""
    name = re.search(rf"{re.escape(opens)}([\w.-]+){re.escape(value_opens)}item_one", listed)
    if member.replace("\n", "") not in nested.replace("\n", "") or name is None:
        return ""
    if name[1] != "key_array":
        return name[1]
    return ""


def _shared_mark(opens: list[str], after: list[str]) -> int:
    """Number of an opening's first tokens that belong to the text before."""
    same = shared_start(opens, after)
    if "".join(same).strip() and len(same) < len(opens):
        return len(same)
    return 0


def _types(probes: TemplateProbes, value_opens: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Opening of a value with its type slot, and type names."""
    opened = {"string": value_opens}
    last = tokens(value_opens)[-1]
    for kind, value in TYPED.items():
        key = f"key_{kind}"
        _, separator, text = (probes.turn("", probes.calls({key: value})) or "").partition(key)
        openings = [text[: match.start()] for match in re.finditer(_SCALAR[kind], text)]
        if separator and openings:
            opened[kind] = max(openings, key=lambda opening: opening.endswith(last))
    first = tokens(value_opens)[:1]
    is_same = len(set(opened.values())) == 1
    if is_same or any(tokens(opening)[:1] != first for opening in opened.values()):
        return value_opens, ()
    start = min(shared_length(value_opens, opening) for opening in opened.values())
    backwards = value_opens[start:][::-1]
    end = min(shared_length(backwards, opening[start:][::-1]) for opening in opened.values())
    while start and value_opens[start - 1].isalnum():
        start -= 1
    while end and value_opens[len(value_opens) - end].isalnum():
        end -= 1
    types = {kind: opening[start : len(opening) - end] for kind, opening in opened.items()}
    tail = value_opens[len(value_opens) - end :]
    return value_opens[:start] + TYPE + tail, tuple(types.items())


def _counted(before: list[str], two: str) -> str:
    """The text before a list, whose number of calls is a slot."""
    text = "".join(before)
    for index, token in enumerate(before):
        marked = "".join([*before[:index], COUNT, *before[index + 1 :]])
        if token == "1" and marked.replace(COUNT, "2") in two:
            if text in two:
                return text
            return marked
    return text


def _list_between(two: str) -> str:
    """The text between two objects of a list."""
    if any(name not in two for name in NAMES):
        return ""
    end = _json_end(two, two.rfind("{", 0, two.find(NAMES[0])))
    second = two.find("{", end)
    if 0 <= end < second:
        return two[end:second]
    return ""


def _before(probes: TemplateProbes, text: str, reasoning: ReasoningMarks | None) -> str:
    """Text before a call, without the turn opening and empty thoughts."""
    before = probes.answer(text)
    _, content, marked = (probes.turn(CONTENT, probes.calls(TWO)) or "").partition(CONTENT)
    second = _written(probes, marked, 0) if content else None
    if second is not None:
        joined = "".join(shared_end(tokens(text), tokens(marked[: second.start])))
        if joined.strip() and len(joined.strip()) <= len(before.strip()):
            before = joined
    for mark in () if reasoning is None else (reasoning.opens, reasoning.closes):
        before = before.lstrip().removeprefix(mark)
    return before.lstrip()


def _outside(before: str, turn: TurnMarks) -> str:
    """Text before calls without the marks that close the content."""
    for mark in turn.wrappers[1:]:
        before = before.removeprefix(mark).lstrip()
    return before


def _after(probes: TemplateProbes, text: str, turn: TurnMarks) -> str:
    """Text after a call, without the end of the turn."""
    for eos in probes.eos:
        text = text.partition(eos)[0]
    ending = tokens(turn.end.strip())
    after = tokens(text.rstrip())
    after = after[: _start_of_prose(after, probes.bare.rpartition(USER["content"])[2])]
    same = shared_end(after, ending)
    if same and len(same) == len(ending):
        after = after[: len(after) - len(same)]
    closes = "".join(after).rstrip()
    for mark in reversed(turn.wrappers[1:]):
        closes = closes.removesuffix(mark).rstrip()
    return closes


def _start_of_prose(after: list[str], prompt: str) -> int:
    """Number of tokens before the text that follows any message."""
    for index in range(len(after)):
        prose = "".join(after[index:])
        if len(prose) >= MIN_PROSE and prose in prompt:
            return index
    return len(after)
