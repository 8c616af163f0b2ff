"""Derives tool-call syntax from the rendering of probe calls."""

import re
from collections.abc import Callable
from itertools import dropwhile
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.text.formats.argument_values import object_of
from mlxstack.text.formats.probe_renderings import (
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
from mlxstack.text.formats.reasoning_derivation import TurnMarks
from mlxstack.text.formats.syntax import (
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


class WrittenCall(Struct, frozen=True):
    """Call in a rendered template: start, end and body."""

    start: int
    end: int
    body: CallBody


def derive_calls(
    probes: TemplateProbes, turn: TurnMarks, reasoning: ReasoningMarks | None
) -> CallSyntax | None:
    """Call syntax of a template; None for an unknown one."""
    one = _one_call(probes)
    if one is None:
        return None
    written = _written(probes, one, 0)
    if written is None:
        return None
    before = _outside(_before(probes, one[: written.start], reasoning), turn)
    after = _after(probes, one[written.end :], turn)
    if isinstance(written.body, PythonBody):
        between = ", " if written.body.is_list else _python_between(probes)
        return CallSyntax(written.body, opens=before, closes=after, between=between)
    return _framed(probes, written, (before, after), turn)


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


def _framed(
    probes: TemplateProbes, written: WrittenCall, around: tuple[str, str], turn: TurnMarks
) -> CallSyntax:
    """Marks around a body: of all calls, and of each."""
    two = probes.turn("", probes.calls(TWO, TWO)) or ""
    before = tokens(around[0])
    body = written.body
    if isinstance(body, JsonBody) and body.is_list:
        between = _list_between(two) or ", "
        return CallSyntax(body, opens=_counted(before, two), closes=around[1], between=between)
    first = _written(probes, two, 0)
    second = _written(probes, two, 1)
    if first is None or second is None:
        return CallSyntax(body, opens=around[0], closes=around[1])
    middle = tokens(two[first.end : second.start])
    # A template may close its section only after several calls.
    after = tokens(_after(probes, two[second.end :], turn))
    opens = list(dropwhile(str.isspace, shared_end(before, middle)))
    middle = middle[: len(middle) - len(opens)]
    closes = list(dropwhile(str.isspace, shared_start(after, middle)[::-1]))[::-1]
    section = before[: len(before) - len(opens)]
    ending = after[len(closes) :]
    n = _shared_mark(opens, ending)
    section = section + opens[:n]
    closes = closes + opens[:n]
    opens = opens[n:]
    ending = ending[n:]
    middle = [*closes, *middle[len(closes) - n :]] if n else middle
    return CallSyntax(
        body,
        section_opens="".join(section) if "".join(section).strip() else "",
        section_closes="".join(ending) if "".join(ending).strip() else "",
        opens="".join(opens),
        closes="".join(closes),
        between="".join(middle[len(closes) :]),
    )


def _written(probes: TemplateProbes, text: str, at: int) -> WrittenCall | None:
    """The call number `at` in a turn."""
    start = text.find(NAMES[at])
    if start < 0:
        return None
    return (
        _json(text, start, at)
        or _python(probes, text, start)
        or _named(text, start, at)
        or _tagged(probes, text, start)
    )


def _json(text: str, name: int, at: int) -> WrittenCall | None:
    """A call as an object, or in a list of objects."""
    for match in re.finditer(r"[\[{]", text[:name]):
        end = _json_end(text, match.start())
        if end <= name:
            continue
        try:
            value = object_of(text[match.start() : end])
        except ValueError:
            continue
        item = value[0] if isinstance(value, list) and value else value
        body = _json_body(item, at) if isinstance(item, dict) else None
        if body is None:
            continue
        if not isinstance(value, list):
            parts = _parts(text[match.start() : end], at)
            return WrittenCall(match.start(), end, replace(body, parts=parts))
        inner = text.index("{", match.start())
        stop = _json_end(text, inner)
        last = text.rindex("}", 0, end) + 1
        listed = replace(
            body,
            parts=_parts(text[inner:stop], 0),
            is_list=True,
            list_opens=text[match.start() : inner],
            list_closes=text[last:end],
        )
        return WrittenCall(match.start(), end, listed)
    return None


def _json_body(item: dict[str, Any], at: int) -> JsonBody | None:
    """JSON paths of name, arguments and id in a call."""
    if NAMES[at] in item:
        return JsonBody((), (), (NAMES[at],))
    name = _path(item, lambda one: one == NAMES[at])
    arguments = _path(item, _is_arguments)
    if name is None or arguments is None:
        return None
    id_path = _path(item, lambda one: one == IDS[at])
    ids = [key for key, value in item.items() if "id" in key and isinstance(value, int | str)]
    return JsonBody((), name, arguments, id_path or (tuple(ids[:1]) if ids else ()))


def _path(item: dict[str, Any], is_it: Callable[[Any], bool]) -> tuple[str, ...] | None:
    """Path of the first value of a kind; None without one."""
    for key, value in item.items():
        if is_it(value):
            return (key,)
        if isinstance(value, dict) and (rest := _path(value, is_it)) is not None:
            return (key, *rest)
    return None


def _is_arguments(value: Any) -> bool:
    return value == TWO or (isinstance(value, str) and VALUES[0] in value)


def _json_end(text: str, at: int) -> int:
    """End of the JSON value at a position; -1 without one."""
    depth = 0
    is_text = False
    for match in re.compile(r'\\.|["\[\]{}]', re.DOTALL).finditer(text, at):
        sign = match[0]
        if sign == '"':
            is_text = not is_text
        elif not is_text and sign in "[]{}":
            depth += 1 if sign in "[{" else -1
            if depth == 0:
                return match.end()
    return -1


def _parts(text: str, at: int) -> tuple[str, ...]:
    """The literals and slots of a call written as JSON."""
    start = text.find(KEYS[0])
    opening = text.rfind("{", 0, start)
    end = _json_end(text, opening)
    quoted = text[max(0, opening - 1)] == '"' and text[end : end + 1] == '"'
    marked = text[: opening - quoted] + ARGUMENTS + text[end + quoted :]
    slots = {NAMES[at]: NAME, IDS[at]: ID}
    parts = re.split(
        "(" + "|".join(map(re.escape, (*slots, ARGUMENTS))) + ")",
        re.sub(r'("[a-z_]*id": ?")\d+(")', rf"\g<1>{IDS[at]}\2", marked),
    )
    return tuple(slots.get(part, part) for part in parts if part)


def _python(probes: TemplateProbes, text: str, name: int) -> WrittenCall | None:
    """Python calls, in a list or between marks."""
    call = re.compile(rf"{NAMES[0]}\(\s*{KEYS[0]}\s*=[^()]*\)").match(text, name)
    if call is None:
        return None
    start = text.rfind("[", 0, name)
    end = text.find("]", name) + 1
    typed = probes.turn("", probes.calls({"key_integer": TYPED["integer"]})) or ""
    body = PythonBody(
        has_bare_text=re.search(rf"{KEYS[0]}\s*=\s*{VALUES[0]}", call[0]) is not None,
        has_quoted_values=re.search(rf"[\"']{TYPED['integer']}[\"']", typed) is not None,
    )
    if start >= 0 and end and not text[start + 1 : name].strip():
        return WrittenCall(start, end, body)
    return WrittenCall(name, call.end(), replace(body, is_list=False))


def _python_between(probes: TemplateProbes) -> str:
    """The text between two Python calls without a list."""
    two = probes.turn("", probes.calls(TWO, TWO)) or ""
    match = re.search(rf"{NAMES[0]}\([^()]*\)(.*?){NAMES[1]}\(", two, re.DOTALL)
    return match[1] if match else "\n"


def _named(text: str, name: int, at: int) -> WrittenCall | None:
    """A name, then the arguments as JSON."""
    key = text.find(f'"{KEYS[0]}"', name)
    opening = text.rfind("{", name, key) if key >= 0 else -1
    end = _json_end(text, opening) if opening >= 0 else -1
    if end < 0 or VALUES[1] not in text[opening:end]:
        return None
    if text.find(NAMES[1 - at], name, opening) >= 0:
        return None
    start, before = _id_before(text, name, at)
    parts = _head_parts(text[name + len(NAMES[at]) : opening], at)
    return WrittenCall(start, end, NamedBody((*before, NAME, *parts)))


def _id_before(text: str, name: int, at: int) -> tuple[int, tuple[str, ...]]:
    """Start of a call with a leading id, and its parts."""
    start = text.rfind(IDS[at], 0, name)
    between = text[start + len(IDS[at]) : name]
    if start < 0 or any(one in between for one in (*NAMES, *VALUES)):
        return name, ()
    return start, (ID, between)


def _head_parts(text: str, at: int) -> tuple[str, ...]:
    """The literals and slots after a name."""
    # A name may stand in a header and in the call itself.
    named = {IDS[at]: ID, NAMES[at]: NAME}
    parts = re.split(f"({'|'.join(named)})", text)
    slots = tuple(named.get(part, part) for part in parts if part)
    # Calls are counted from 0 or from 1.
    index = re.search(rf"(?<=\W)(?:{at}|{at + 1})(?=\W|$)", slots[0]) if slots else None
    if index is None:
        return slots
    around = (slots[0][: index.start()], INDEX, slots[0][index.end() :])
    return (*(part for part in around if part), *slots[1:])


def _tagged(probes: TemplateProbes, text: str, name: int) -> WrittenCall | None:
    """A name, then a pair of tags for each argument."""
    places = [text.find(one, name) for one in (KEYS[0], VALUES[0], KEYS[1], VALUES[1])]
    if -1 in places or sorted(places) != places:
        return None
    key, value, second, last = places
    at = 0 if text.startswith(NAMES[0], name) else 1
    head = text[name + len(NAMES[at]) : key]
    value_opens = text[key + len(KEYS[0]) : value]
    between = text[value + len(VALUES[0]) : second].replace(KEYS[0], KEY)
    after = text[last + len(VALUES[1]) :].replace(KEYS[1], KEY, 1)
    has_json = value_opens.endswith('"') and between[:1] == after[:1] == '"'
    if has_json:
        value_opens = value_opens[:-1]
        between = between[1:]
        after = after[1:]
    if not value_opens.strip() or not (between.strip() or has_json):
        return None
    argument_opens = shared_end(tokens(head), tokens(between))
    closing = tokens(between)[: len(tokens(between)) - len(argument_opens)]
    closes = shared_start(closing, tokens(after))
    n = _shared_mark(argument_opens, tokens(after)[len(closes) :])
    closes += argument_opens[:n]
    opening = "".join(argument_opens[n:])
    head = head[: len(head) - len(opening)]
    value_closes = "".join(closes).rstrip()
    item = "" if has_json else _item(probes, opening, value_opens, value_closes)
    types = (value_opens, ()) if item else _types(probes, value_opens)
    start, before = _id_before(text, name, at)
    body = TaggedBody(
        (*before, NAME, *_head_parts(head, 0)),
        argument_opens=opening,
        value_opens=types[0],
        value_closes=value_closes,
        types=types[1],
        has_json_text=has_json,
        item=item,
    )
    if not has_json and not (opening.strip() and value_closes.strip()):
        return None
    end = last + len(VALUES[1]) + has_json
    ending = value_closes.replace(KEY, KEYS[1])
    end = text.find(ending, end) + len(ending)
    return WrittenCall(start, end, body)


def _item(probes: TemplateProbes, opens: str, value_opens: str, closes: str) -> str:
    """Name of list item tags, if values are nested tags."""
    member = f"{opens}key_in{value_opens}value_in{closes.replace(KEY, 'key_in')}"
    listed = probes.turn("", probes.calls({"key_array": ["item_one"]})) or ""
    nested = probes.turn("", probes.calls({"key_object": {"key_in": "value_in"}})) or ""
    name = re.search(rf"{re.escape(opens)}([\w.-]+){re.escape(value_opens)}item_one", listed)
    if member.replace("\n", "") not in nested.replace("\n", "") or name is None:
        return ""
    return name[1] if name[1] != "key_array" else ""


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
        text = probes.turn("", probes.calls({key: value})) or ""
        at = text.find(key)
        opening = _value_opening(text[at + len(key) :], kind, last) if at >= 0 else None
        if opening is not None:
            opened[kind] = opening
    if len(set(opened.values())) == 1 or not all(
        tokens(one)[:1] == tokens(value_opens)[:1] for one in opened.values()
    ):
        return value_opens, ()
    start = min(shared_length(value_opens, one) for one in opened.values())
    rest = value_opens[start:][::-1]
    end = min(shared_length(rest, one[start:][::-1]) for one in opened.values())
    while start and value_opens[start - 1].isalnum():
        start -= 1
    while end and value_opens[len(value_opens) - end].isalnum():
        end -= 1
    types = {kind: one[start : len(one) - end] for kind, one in opened.items()}
    tail = value_opens[len(value_opens) - end :]
    return value_opens[:start] + TYPE + tail, tuple(types.items())


def _value_opening(text: str, kind: str, last: str) -> str | None:
    """Text before a value of this type; None without one."""
    found = [text[: match.start()] for match in re.finditer(_SCALAR[kind], text)]
    return next((one for one in found if one.endswith(last)), next(iter(found), None))


def _counted(before: list[str], two: str) -> str:
    """The text before a list, whose number of calls is a slot."""
    text = "".join(before)
    for at, token in enumerate(before):
        marked = "".join([*before[:at], COUNT, *before[at + 1 :]])
        if token == "1" and marked.replace(COUNT, "2") in two:
            return text if text in two else marked
    return text


def _list_between(two: str) -> str:
    """The text between two objects of a list."""
    if any(name not in two for name in NAMES):
        return ""
    first = two.rfind("{", 0, two.find(NAMES[0]))
    end = _json_end(two, first)
    second = two.find("{", end)
    return two[end:second] if 0 <= end < second else ""


def _before(probes: TemplateProbes, text: str, reasoning: ReasoningMarks | None) -> str:
    """Text before a call, without the turn opening and empty thoughts."""
    before = probes.answer(text)
    marked = probes.turn(CONTENT, probes.calls(TWO))
    at = -1 if marked is None else marked.find(CONTENT)
    second = _written(probes, marked, 0) if marked is not None and at >= 0 else None
    if marked is not None and second is not None and at < second.start:
        inside = shared_end(tokens(text), tokens(marked[at + len(CONTENT) : second.start]))
        joined = "".join(inside)
        if joined.strip() and len(joined.strip()) <= len(before.strip()):
            before = joined
    for mark in () if reasoning is None else (reasoning.opens, reasoning.closes):
        before = before.lstrip().removeprefix(mark) if mark else before
    return before.lstrip()


def _outside(before: str, turn: TurnMarks) -> str:
    """Text before calls without the marks that close the content."""
    for mark in turn.wrappers[1:]:
        before = before.removeprefix(mark).lstrip()
    return before


def _after(probes: TemplateProbes, text: str, turn: TurnMarks) -> str:
    """Text after a call, without the end of the turn."""
    cuts = [text.find(eos) for eos in probes.eos if eos in text]
    text = text[: min(cuts)] if cuts else text
    ending = tokens(turn.end.strip())
    after = tokens(text.rstrip())
    after = after[: _start_of_prose(after, probes.bare.rpartition(USER["content"])[2])]
    same = shared_end(after, ending)
    if same and len(same) == len(ending):
        after = after[: len(after) - len(same)]
    rest = "".join(after).rstrip()
    for mark in reversed(turn.wrappers[1:]):
        rest = rest.removesuffix(mark).rstrip()
    return rest


def _start_of_prose(after: list[str], prompt: str) -> int:
    """Number of tokens before the text that follows any message."""
    rests = ("".join(after[at:]) for at in range(len(after)))
    found = (at for at, rest in enumerate(rests) if len(rest) >= MIN_PROSE and rest in prompt)
    return next(found, len(after))
