"""Raw answers beside those of templates: each kind of change, for any format."""

import json
import re
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from mlxstack.features.formats.syntax import (
    CallSyntax,
    DerivedFormat,
    JsonBody,
    NamedBody,
    PythonBody,
    TaggedBody,
    first_mark,
    is_mark,
    pieces,
)
from tests.features.formats.formats import EACH, PAIRS, TEXT, TOOL_CALL, Format
from tests.features.formats.invented import thinking

FIRST: dict[str, Any] = {"path": "src/a.py", "n": 3}
SECOND: dict[str, Any] = {"path": "b.py", "all": True}
FOREIGN = json.dumps({"name": "edit", "arguments": FIRST})
THOUGHTS = thinking("<think>\\n", "\\n</think>\\n\\n")
ARGUMENTS = "(f.arguments | tojson)"
NAMED = '{{- \'{"name": "\' + f.name + \'", "arguments": \' + ' + ARGUMENTS + " + '}' }}"
KINDED = (
    '{{- \'{"type": "function", "function": {"name": "\' + f.name + \'", "arguments": \' + '
    + ARGUMENTS
    + " + '}}' }}"
)
NUMBERED = (
    "{{- '{\"tool_call_id\": \"' + loop.index0 | string + '\", \"tool_name\": \"' + f.name }}"
    "{{- '\", \"parameters\": ' + " + ARGUMENTS + " + '}' }}"
)  # fmt: skip


def each(opens: str, closes: str, call: str) -> str:
    """Calls with marks of their own, in lines of their own."""
    ending = f"{{{{- '{closes}' + ('' if loop.last else '\\n') }}}}"
    return f"{EACH}{{{{- '{opens}' }}}}{call}{ending}{{%- endfor %}}"


def section(opens: str, calls: str, closes: str) -> str:
    """Calls between marks of a section."""
    return f"{{%- if m.tool_calls %}}{{{{- '{opens}' }}}}{calls}{{{{- '{closes}' }}}}{{%- endif %}}"


def listed(opens: str, closes: str, call: str) -> str:
    """Calls in one JSON list."""
    items = f"{EACH}{call}{{{{- '' if loop.last else ', ' }}}}{{%- endfor %}}"
    return section(f"{opens}[", items, f"]{closes}")


SIBLINGS = {
    "lines of JSON": Format(
        each("<tool_call>\\n", "\\n</tool_call>", NAMED), added=TOOL_CALL, thoughts=THOUGHTS
    ),
    "type first": Format(
        each("<tool_call>", "</tool_call>", KINDED), added=TOOL_CALL, thoughts=THOUGHTS
    ),
    "two marks": Format(
        each("<|action|><|plugin|>\\n", "<|action_end|>", NAMED),
        special=("<|action|>", "<|plugin|>", "<|action_end|>"),
    ),
    "numbered list": Format(
        listed("<|START_ACT|>", "<|END_ACT|>", NUMBERED),
        special=("<|START_ACT|>", "<|END_ACT|>"),
        thoughts=thinking("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    "list in tags": Format(listed("<CALLS>\\n", "\\n</CALLS>", NAMED), thoughts=THOUGHTS),
    "name in tag": Format(
        each("<function=", "", "{{- f.name + '>' + " + ARGUMENTS + " + '</function>' }}"),
        reminder="<function=x></function>",
        thoughts=THOUGHTS,
    ),
    "name in attribute": Format(
        each('<call name="', "</call>", "{{- f.name + '\">' + " + ARGUMENTS + " }}"),
        reminder="<call></call>",
        thoughts=THOUGHTS,
    ),
    "name in line": Format(
        each("<|tool|>", "<|/tool|>", "{{- f.name + '\\n' + " + ARGUMENTS + " }}"),
        special=("<|tool|>", "<|/tool|>"),
        thoughts=THOUGHTS,
    ),
    "fenced": Format(
        section(
            "<|calls|>",
            EACH + "{{- '<|call|>function<|sep|>' + f.name + '\\n```json\\n' + " + ARGUMENTS
            + " + '\\n```<|/call|>' }}{{- '' if loop.last else '\\n' }}{%- endfor %}",
            "<|/calls|>",
        ),
        special=("<|calls|>", "<|call|>", "<|sep|>", "<|/call|>", "<|/calls|>"),
        thoughts=THOUGHTS,
    ),
    "elements in a section": Format(
        section(
            "<own:calls>\\n",
            EACH + "{{- '<invoke name=\"' + f.name + '\">\\n' }}" + PAIRS
            + "{{- '<parameter name=\"' + k + '\">' + " + TEXT + " + '</parameter>\\n' }}"
            "{%- endfor %}{{- '</invoke>\\n' }}{%- endfor %}",
            "</own:calls>",
        ),
        reminder="<own:calls></own:calls>",
        thoughts=thinking("<own:think>", "</own:think>"),
    ),
    "typed elements": Format(
        section(
            "<|X|calls>\\n",
            EACH + "{{- '<|X|invoke name=\"' + f.name + '\">\\n' }}" + PAIRS
            + "{{- '<|X|parameter name=\"' + k + '\" string=\"' }}"
            "{{- ('true' if v is string else 'false') + '\">' + " + TEXT
            + " + '</|X|parameter>\\n' }}{%- endfor %}{{- '</|X|invoke>\\n' }}{%- endfor %}",
            "</|X|calls>",
        ),
        reminder="<|X|calls></|X|calls>",
        thoughts=THOUGHTS,
    ),
    "Python list": Format(
        section(
            "<|py|>[",
            EACH + "{{- f.name + '(' }}" + PAIRS
            + "{{- k + '=' + ('True' if v is true else 'False' if v is false else v | tojson) }}"
            "{{- '' if loop.last else ', ' }}{%- endfor %}{{- ')' }}"
            "{{- '' if loop.last else ', ' }}{%- endfor %}",
            "]<|/py|>",
        ),
        special=("<|py|>", "<|/py|>"),
        thoughts=THOUGHTS,
    ),
}  # fmt: skip
"""Formats beside the invented ones, of families that published templates have."""


class Raw(Struct, frozen=True):
    """A raw answer, and the message that it means."""

    kind: str
    text: str
    calls: tuple[dict[str, Any], ...] = (FIRST,)
    content: str = ""
    thought: str = ""
    is_in_thinking: bool = False


def answers(found: DerivedFormat, one: str, two: str) -> Iterator[Raw]:
    """Raw answers, made from the text of one call and that of two."""
    yield from _around(found, one, two)
    syntax = found.calls
    assert syntax is not None
    last = pieces(syntax.section_closes or syntax.closes)
    if len(last) == 1 and is_mark(last[0]):
        yield Raw("without its last mark", one.rstrip().removesuffix(last[0]))
    yield from _attributes(syntax, one)
    match syntax.body:
        case JsonBody() | NamedBody() as body:
            yield from _json(syntax, body, one)
        case TaggedBody() as body:
            yield from _foreign(found, syntax, one)
        case PythonBody():
            yield from _python(one)


def _around(found: DerivedFormat, one: str, two: str) -> Iterator[Raw]:
    """Text, thoughts and white space around calls."""
    both = (FIRST, SECOND)
    yield Raw("two", two, both)
    yield Raw("again", f"{one}\n{one}", (FIRST, FIRST))
    yield Raw("again without a space", one + one, (FIRST, FIRST))
    yield Raw("white space around", f"\n\n{one}\n \n")
    yield Raw("text after", f"{one}\n\nDone.", content="Done.")
    if found.calls is not None and not found.calls.is_bare:
        yield Raw("text before", f"So: {one}", content="So:")
        yield Raw("text between", f"{one}\nThen:\n{one}", (FIRST, FIRST), "Then:")
    tight = re.sub(r"([>\]}])\n+(?=[<{\[])", r"\1", two)
    yield Raw("tight", tight, both)
    for end in found.turn_ends:
        yield Raw("end of the turn", one + end)
    if found.reasoning is not None:
        opens = found.reasoning.opens
        closes = found.reasoning.closes
        yield Raw("thought", f"{opens}\nHm.\n{closes}\n\n{one}", thought="Hm.")
        yield Raw("thought and text", f"{opens}Hm.{closes}So:\n{two}", both, "So:", "Hm.")
        yield Raw("open thought", f"{opens}Hm.\n{two}\n", both, thought="Hm.")
        yield Raw("thought of the prompt", f"Hm.\n{one}", thought="Hm.", is_in_thinking=True)


def _attributes(syntax: CallSyntax, one: str) -> Iterator[Raw]:
    """Other quotes around the attributes of tags, or where there are none."""
    body = syntax.body
    if isinstance(body, TaggedBody) and body.has_json_text:
        return
    attribute = re.compile(r'="([^"<>]*)"')
    if attribute.search(one):
        yield Raw("single quotes", attribute.sub(r"='\1'", one))
        if len(attribute.findall(one)) == one.count('"') // 2 and '" ' not in one:
            yield Raw("no quotes", attribute.sub(r"=\1", one))
    elif re.search(r"<\w+=\w+>", one):
        yield Raw("quotes", re.sub(r"(<\w+)=(\w+)>", r'\1="\2">', one))


def _json(syntax: CallSyntax, body: JsonBody | NamedBody, one: str) -> Iterator[Raw]:
    """The same JSON otherwise written."""
    start, end, value = _found(one)
    text = json.dumps(value)

    def put(written: str, kind: str, *calls: dict[str, Any]) -> Raw:
        return Raw(kind, one[:start] + written + one[end:], calls or (FIRST,))

    yield put(json.dumps(value, indent=2), "indented")
    yield put(json.dumps(value, separators=(",", ":")), "compact")
    yield put(text.replace("{", "{ ").replace(": ", " : "), "loose")
    yield put(text.replace("3}", "3,}"), "comma at the end")
    if not syntax.is_bare:
        yield put(repr(value), "Python's quotes")
    if syntax.closes.strip() or syntax.section_closes.strip():
        yield put(f"{text}}}", "brace too many")
        if text.endswith("}"):
            yield put(text[:-1], "brace missing")
    if not syntax.is_bare and "```" not in one:
        yield put(f"\n```json\n{text}\n```\n", "fenced as JSON")
        yield put(f"```\n{text}\n```", "fenced")
    if isinstance(body, JsonBody) and not body.is_list and not syntax.is_bare:
        yield put(f"[{text}]", "in a list")
        if syntax.closes.strip():
            yield put(f"{text}\n{text}", "two objects", FIRST, FIRST)
    if isinstance(body, JsonBody) and body.name and not body.is_list:
        yield put(json.dumps({"type": "function", **value}), "type first")
        yield put(json.dumps(dict(reversed(value.items()))), "reversed")
        encoded = {key: json.dumps(part) if part == FIRST else part for key, part in value.items()}
        yield put(json.dumps(encoded), "arguments as text")


def _found(text: str) -> tuple[int, int, Any]:
    """Start, end and value of the JSON in a text."""
    for match in re.finditer(r"\[(?=\{)|\{", text):
        try:
            value, end = json.JSONDecoder().raw_decode(text, match.start())
        except ValueError:
            continue
        return match.start(), end, value
    raise ValueError(f"no JSON in {text!r}")


def _foreign(found: DerivedFormat, syntax: CallSyntax, one: str) -> Iterator[Raw]:
    """JSON in place of tags."""
    opening = first_mark(syntax.section_opens or syntax.opens)
    closing = [piece for piece in pieces(syntax.closes + syntax.section_closes) if is_mark(piece)]
    others = (*found.wrappers, *found.strays)
    if closing and is_mark(opening) and opening not in map(first_mark, others):
        yield Raw("JSON", f"{opening}\n{FOREIGN}\n{closing[-1]}")
        yield Raw("JSON in a list", f"{opening}[{FOREIGN}]{closing[-1]}")
        yield Raw("fenced JSON", f"{opening}\n```json\n{FOREIGN}\n```\n{closing[-1]}")
        yield Raw("two objects", f"{opening}{FOREIGN}\n{FOREIGN}{closing[-1]}", (FIRST, FIRST))
    body = syntax.body
    assert isinstance(body, TaggedBody)
    if body.has_json_text or not body.argument_opens.strip():
        return
    if "{key}" not in body.value_closes:
        lone = body.value_closes.strip()
        yield Raw("a value without its end", one.replace(lone, "", 1))
    start = one.index(body.argument_opens.strip() + "path")
    closes = body.value_closes.strip().replace("{key}", "n")
    end = one.rindex(closes) + len(closes)
    for kind, text in (
        ("an object of arguments", json.dumps(FIRST)),
        ("a fenced object", f"\n```json\n{json.dumps(FIRST)}\n```\n"),
    ):
        yield Raw(kind, one[:start] + text + one[end:])
    if "type" in body.value_opens or "kind" in body.value_opens or "string" in body.value_opens:
        yield Raw("number in quotes", re.sub(r">3<", '>"3"<', one))


def _python(one: str) -> Iterator[Raw]:
    yield Raw("Python's quotes", one.replace('"', "'"))
    yield Raw("lines", one.replace("(", "(\n    ").replace(", n", ",\n    n").replace(")", ",\n)"))
    yield Raw("loose", one.replace("=", " = "))
    yield Raw("without a list", one.replace("[", "").replace("]", ""))
