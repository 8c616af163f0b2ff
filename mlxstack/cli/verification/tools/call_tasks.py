"""A hundred requests for tool calls: ten kinds, ten of each."""

import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from msgspec import Struct

N_OF_KIND = 10
N_LINES = 200
"""Lines of the code that a call writes."""
N_TURNS = 24
"""Calls with their results before the one that is asked for."""
SYSTEM = "Use the tools. Call them right away, without explanations."
CHARS_PER_TOKEN = 2.0
"""Fewest characters that a token of an answer is assumed to have."""
MIN_TOKENS = 96
"""Bound of a short answer: a sentence and a call."""


class CallKind(StrEnum):
    """Kind of a call, by its arguments or its conversation."""

    TEXT = "text with quotes and newlines"
    CODE = "code"
    NESTED = "nested objects"
    UNION = "unions"
    ENUM = "enums"
    NUMBER = "numbers"
    PARALLEL = "parallel calls"
    RESULTS = "results out of order"
    TURNS = "many turns"
    CHOICE = "one of twenty tools"


class CallSizes(Struct, frozen=True):
    """Sizes of the long ones."""

    n_lines: int = N_LINES
    n_turns: int = N_TURNS


QUICK = CallSizes(n_lines=20, n_turns=6)


class ExpectedCall(Struct, frozen=True):
    """Call that does what was asked for."""

    name: str
    arguments: dict[str, Any]


class CallTask(Struct, frozen=True):
    """Conversation whose next answer should be these calls."""

    kind: CallKind
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    expected: tuple[ExpectedCall, ...]

    @property
    def max_tokens(self) -> int:
        """Bound of the answer, well above what the calls need."""
        n_chars = sum(len(json.dumps(call.arguments)) + len(call.name) for call in self.expected)
        return MIN_TOKENS + int(n_chars / CHARS_PER_TOKEN)


def tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    """Definition of a tool whose arguments are all required."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


STRING = {"type": "string"}
INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
PLACE = {
    "type": "object",
    "properties": {"street": STRING, "city": STRING},
    "required": ["street", "city"],
    "additionalProperties": False,
}
GUEST = {
    "type": "object",
    "properties": {"name": STRING, "age": INTEGER},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCALARS = {"anyOf": [STRING, INTEGER, {"type": "boolean"}, {"type": "array", "items": STRING}]}
ROOMS = ("kitchen", "hall", "bath", "attic", "garage")
COLORS = ("red", "green", "blue", "white")
LEVELS = (0, 25, 50, 75, 100)
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ida", "Jon")
CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Paris", "Delhi", "Quito", "Bern", "Kyiv", "Tunis")
VERBS = ("open", "close", "start", "stop", "lock", "clean", "paint", "move", "count", "weigh")
THINGS = ("door", "engine")
TEXTS = (
    'She said: "It\'s late."',
    "first line\nsecond line\n\nfourth line",
    "key = \"value\"\nother = 'value'",
    "C:\\temp\\new.txt",
    'a "quoted" word and a \\ backslash',
    "tab\there\nand a new line",
    '{"json": "in a text"}',
    "`code` and ```fences```",
    "é, ü, 日本 and 🙂\nin two lines",
    "<b>tags</b> & 'entities' &amp;",
)
VALUES = ("blue", 7, True, ["a", "b"], "12", -3, False, ["x"], "true", 0)
MOVES = (
    (1.5, -2.25, 3), (-0.5, 10, 1), (1000000, 0.001, 99), (3.14159, 2.71828, 7), (-7, -8, 42),
    (0, 0, 100), (12345.678, -0.1, 5), (2e10, 1, 2), (0.25, 0.75, 64), (-1, 99.99, 10),
)  # fmt: skip
TOOL_OF_TEXT = tool("send", "Send a text to a person.", to=STRING, text=STRING)
TOOL_OF_CODE = tool("write_file", "Write a file.", path=STRING, content=STRING)
TOOL_OF_NESTED = tool(
    "create_event",
    "Create an event.",
    title=STRING,
    place=PLACE,
    guests={"type": "array", "items": GUEST, "minItems": 1},
)
TOOL_OF_UNION = tool("set_value", "Set a value.", key=STRING, value=SCALARS)
TOOL_OF_ENUM = tool(
    "set_light",
    "Set a light.",
    room={"enum": list(ROOMS)},
    color={"enum": list(COLORS)},
    level={"enum": list(LEVELS)},
)
TOOL_OF_NUMBER = tool(
    "move", "Move the arm.", x=NUMBER, y=NUMBER, steps={**INTEGER, "minimum": 1, "maximum": 100}
)
TOOL_OF_READING = tool("read_file", "Read a file.", path=STRING)
TOOL_OF_WEATHER = tool("temperature", "Temperature of a city.", city=STRING)
TOOL_OF_BOOKING = tool("book_hotel", "Book a hotel.", city=STRING)
TOOLS_OF_CHOICE = tuple(
    tool(f"{verb}_{thing}", f"{verb.capitalize()} the {thing}.", number=INTEGER)
    for verb in VERBS
    for thing in THINGS
)


def call_tasks(sizes: CallSizes = CallSizes()) -> tuple[CallTask, ...]:
    """All requests by kind, so that they share the beginning of prompts."""
    return (*_single_calls(sizes), *_parallel(), *_results(), *_turns(sizes), *_choices())


def _single_calls(sizes: CallSizes) -> Iterator[CallTask]:
    for name, text in zip(NAMES, TEXTS, strict=True):
        yield _task(
            CallKind.TEXT,
            f"Send {name} exactly the text between the lines:\n---\n{text}\n---",
            TOOL_OF_TEXT,
            {"to": name, "text": text},
        )
    for index in range(N_OF_KIND):
        path = f"module_{index}.py"
        code = source(index, sizes.n_lines)
        yield _task(
            CallKind.CODE,
            f"Write the file {path} with exactly this content:\n```python\n{code}```",
            TOOL_OF_CODE,
            {"path": path, "content": code},
        )
    for index, (name, city) in enumerate(zip(NAMES, CITIES, strict=True)):
        guests = [{"name": name, "age": 30 + index}, {"name": NAMES[index - 1], "age": 20 + index}]
        yield _task(
            CallKind.NESTED,
            f"Create the event 'Party {index}' at {index + 1} Main Street in {city} for "
            + " and ".join(f"{guest['name']}, aged {guest['age']}" for guest in guests),
            TOOL_OF_NESTED,
            {
                "title": f"Party {index}",
                "place": {"street": f"{index + 1} Main Street", "city": city},
                "guests": guests,
            },
        )
    for index, value in enumerate(VALUES):
        yield _task(
            CallKind.UNION,
            f"Set the key k{index} to this JSON value: {json.dumps(value)}",
            TOOL_OF_UNION,
            {"key": f"k{index}", "value": value},
        )
    for index in range(N_OF_KIND):
        light = {
            "room": ROOMS[index % len(ROOMS)],
            "color": COLORS[index % len(COLORS)],
            "level": LEVELS[index * 3 % len(LEVELS)],
        }
        yield _task(
            CallKind.ENUM,
            f"Make the light of the {light['room']} {light['color']}, at {light['level']} percent.",
            TOOL_OF_ENUM,
            light,
        )
    for x, y, steps in MOVES:
        yield _task(
            CallKind.NUMBER,
            f"Move the arm to x = {x:.12g}, y = {y:.12g} in {steps} steps.",
            TOOL_OF_NUMBER,
            {"x": x, "y": y, "steps": steps},
        )


def _parallel() -> Iterator[CallTask]:
    for index in range(N_OF_KIND):
        paths = [f"part_{index + n}.txt" for n in range(2 + index % 2)]
        yield CallTask(
            CallKind.PARALLEL,
            _asked(f"Read the files {' and '.join(paths)} at once, with a call for each file."),
            (TOOL_OF_READING,),
            tuple(ExpectedCall("read_file", {"path": path}) for path in paths),
        )


def _results() -> Iterator[CallTask]:
    """Two calls, whose results come in the other order."""
    for index, (first, second) in enumerate(zip(CITIES, CITIES[1:] + CITIES[:1], strict=True)):
        calls = (
            _call(f"call{index}a", "temperature", {"city": first}),
            _call(f"call{index}b", "temperature", {"city": second}),
        )
        is_first_warmer = bool(index % 2)
        degrees = {calls[0]["id"]: 8, calls[1]["id"]: 31}
        if is_first_warmer:
            degrees = {calls[0]["id"]: 31, calls[1]["id"]: 8}
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"{degrees[call['id']]} °C"}
            for call in reversed(calls)
        ]
        question = (
            f"Find the temperatures of {first} and {second}. Then book a hotel in the warmer city."
        )
        yield CallTask(
            CallKind.RESULTS,
            (*_asked(question), _answer(*calls), *results),
            (TOOL_OF_WEATHER, TOOL_OF_BOOKING),
            (ExpectedCall("book_hotel", {"city": first if is_first_warmer else second}),),
        )


def _turns(sizes: CallSizes) -> Iterator[CallTask]:
    """Files that name the next one; the last one is asked for."""
    for index in range(N_OF_KIND):
        messages = _asked("Read start.txt. Each file names the next one to read; go on until END.")
        path = "start.txt"
        for number in range(sizes.n_turns):
            call = _call(f"call{number}", "read_file", {"path": path})
            path = f"{NAMES[(index + number) % len(NAMES)].lower()}_{number}.txt"
            result = {"role": "tool", "tool_call_id": call["id"], "content": f"next: {path}"}
            messages += (_answer(call), result)
        expected = ExpectedCall("read_file", {"path": path})
        yield CallTask(CallKind.TURNS, messages, (TOOL_OF_READING,), (expected,))


def _choices() -> Iterator[CallTask]:
    for index in range(N_OF_KIND):
        thing = THINGS[index % len(THINGS)]
        yield CallTask(
            CallKind.CHOICE,
            _asked(f"{VERBS[index].capitalize()} {thing} number {index + 1}."),
            TOOLS_OF_CHOICE,
            (ExpectedCall(f"{VERBS[index]}_{thing}", {"number": index + 1}),),
        )


def source(index: int, n_lines: int) -> str:
    """Code of so many lines, no two of them the same."""
    lines = [f'"""Module {index}: it\'s "code"."""', ""]
    for number in range(n_lines):
        lines += [f"def step_{number}(x):", f'    return f"{{x}}: {number * 7 + index}"', ""]
    return "\n".join(lines[:n_lines]) + "\n"


def _task(
    kind: CallKind, question: str, offered: dict[str, Any], arguments: dict[str, Any]
) -> CallTask:
    expected = ExpectedCall(offered["function"]["name"], arguments)
    return CallTask(kind, _asked(question), (offered,), (expected,))


def _asked(question: str) -> tuple[dict[str, Any], ...]:
    return ({"role": "system", "content": SYSTEM}, {"role": "user", "content": question})


def _call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def _answer(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}
