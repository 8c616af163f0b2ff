"""Records sessions of real coding agents for tests.

`python -m tests.clients.agent_recorder FOLDER [CLIENT ...]` makes the recordings of what
`make agents` wrote to FOLDER. Words of vendors become filler of their length, folders of the
machine short names, and long answers without calls are cut.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from tests.api.running import Running
from tests.clients.agent_recordings import (
    RECORDINGS,
    JsonObject,
    ReadAnswer,
    RecordedAgent,
    RecordedRequest,
    read_answer,
    turns_key,
)
from tests.clients.agents import GENERATIONS
from tests.clients.fleet_recordings import (
    INVENTORY,
    README,
    REMINDER,
    TESTS,
    filled,
    with_own_words,
    without_descriptions,
)
from tests.clients.relay import Exchange

RAW = "exchanges.json"
MAX_SAID = 400
"""Characters of an answer without calls: a longer one is only read slowly."""
MAX_QUOTED = 40
"""Characters of a client's sentence that an answer may repeat."""
PIECES = re.compile(r'(?<=[.;:!?])\s|\n|\\n|"')
"""Where sentences and lines end, in JSON too."""
BILLING = "x-anthropic-billing-header"
IDS = re.compile(
    r"\b(?:[0-9a-f]{64}|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})\b"
)
"""Ids of sessions, devices and requests."""


class SampledText(Struct, frozen=True):
    """Text of a complete answer after it was parsed, and as the model wrote it."""

    text: str
    said: str


class RawExchange(Struct, frozen=True):
    """Request and its answer."""

    path: str
    body: str
    status: int | None
    answer: str


class RawSession(Struct, frozen=True):
    """All that went between a client and the service, and what the model wrote."""

    place: str
    """Folder of the project."""
    programs: str
    """Environment with the client."""
    questions: tuple[str, ...]
    """Texts that the client was given."""
    exchanges: tuple[RawExchange, ...]
    texts: tuple[SampledText, ...]


@contextmanager
def sampled_texts(live: Running) -> Iterator[list[SampledText]]:
    """Complete answers from here on."""
    prompt_maker = live.service.text_processor.prompt_maker
    tokenizer: Any = live.service.text_processor.tokenizer
    texts: list[SampledText] = []
    remember = prompt_maker.remember_answer

    def noting(scope: Any, prompt: Any, answer: Any) -> None:
        texts.append(SampledText(answer.message.text, tokenizer.decode(list(answer.tokens))))
        remember(scope, prompt, answer)

    prompt_maker.remember_answer = noting  # type: ignore[method-assign]
    try:
        yield texts
    finally:
        prompt_maker.remember_answer = remember  # type: ignore[method-assign]


def raw_session(
    place: Path,
    questions: tuple[str, ...],
    exchanges: Sequence[Exchange],
    texts: Sequence[SampledText],
) -> RawSession:
    """Requests for answers as they were, with all their words."""
    raw_exchanges = tuple(
        RawExchange(each.path, each.body.decode(), each.status, each.answer.decode())
        for each in exchanges
        if each.path.partition("?")[0] in GENERATIONS
    )
    programs = str(Path(sys.prefix).resolve())
    return RawSession(str(place), programs, questions, raw_exchanges, tuple(texts))


def recorded(client: str, raw: RawSession) -> RecordedAgent:
    """Session without words of vendors and folders of the machine."""
    exchanges = [each for each in raw.exchanges if read_answer(each.path, each.answer).is_whole]
    texts = list(raw.texts)
    replacements = _Replacements(raw)
    answered = []
    for exchange in exchanges:
        answer, said = _answered(exchange, texts)
        replacements.note(exchange, answer, said)
        answered.append((answer, said))
    bodies: list[JsonObject] = []
    requests = []
    for exchange, (answer, said) in zip(exchanges, answered, strict=True):
        body = replacements.short_body(exchange)
        difference = _difference(exchange.path, body, bodies)
        requests.append(
            replace(
                difference,
                said=replacements.short(said if answer.calls else _cut(said)),
                calls=tuple(
                    replace(c, arguments=replacements.short(c.arguments)) for c in answer.calls
                ),
            )
        )
        bodies.append(body)
    return RecordedAgent(client, tuple(requests))


def _answered(exchange: RawExchange, texts: list[SampledText]) -> tuple[ReadAnswer, str]:
    """Answer as the client read it and as the model wrote it; takes its text from `texts`."""
    answer = read_answer(exchange.path, exchange.answer)
    for sampled in texts:
        if sampled.text == answer.text:
            texts.remove(sampled)
            return answer, sampled.said
    if answer.calls:
        raise ValueError(f"{exchange.path}: nobody knows how {answer.calls[0].name} was written")
    return answer, answer.text


def _cut(text: str) -> str:
    """The first lines of a text."""
    if len(text) <= MAX_SAID:
        return text
    return text[:MAX_SAID].rpartition("\n")[0] or text[:MAX_SAID]


class _Replacements:
    """Replacements in a recording for words of vendors, folders and ids."""

    def __init__(self, raw: RawSession) -> None:
        self._names = {
            raw.place: "/project",
            str(Path(raw.place).parent): "/client",
            raw.programs: "/programs",
        }
        self._questions = raw.questions
        self._own = "\n".join((INVENTORY, TESTS, README, *raw.questions))
        self._theirs = ""
        self._quotes: dict[str, str] = {}
        self._written: dict[str, str] = {}
        """Answers by their whole texts."""

    def note(self, exchange: RawExchange, answer: ReadAnswer, said: str) -> None:
        """Take in a request, and an answer that may quote it or those before it."""
        body = json.loads(exchange.body)
        items = body[turns_key(exchange.path)]
        asked = [item for item in items if item.get("role") in ("system", "developer", "user")]
        head = [body.get(name) for name in ("system", "instructions", "tools")]
        self._theirs += "\n".join(_texts([head, asked]))
        for piece in PIECES.split(said):
            if len(piece) > MAX_QUOTED and piece in self._theirs and piece not in self._own:
                self._quotes[piece] = filled(piece)
        self._written[answer.text.strip()] = _cut(answer.text)

    def short(self, text: str) -> str:
        """Text of the model with filler for quotes, and with short names for folders."""
        for piece, mark in self._quotes.items():
            text = text.replace(piece, mark)
        for folder, name in self._names.items():
            text = text.replace(folder, name)
        return IDS.sub(lambda found: re.sub("[0-9a-f]", "0", found[0]), text)

    def short_body(self, exchange: RawExchange) -> JsonObject:
        """Body without the client's own words, and with answers as they are recorded."""
        body = json.loads(exchange.body)
        key = turns_key(exchange.path)
        shortened = {**body, key: [self._item(item) for item in body[key]]}
        if "tools" in body:
            shortened["tools"] = without_descriptions(body["tools"])
        if "instructions" in body:
            shortened["instructions"] = filled(body["instructions"])
        if "system" in body:
            shortened["system"] = _mapped(body["system"], _head_text)
        return dict(_everywhere(shortened, self.short))

    def _item(self, item: JsonObject) -> JsonObject:
        shortened = {**item}
        for key in ("content", "output"):
            if item.get(key):
                shortened[key] = _mapped(item[key], self._changes(item.get("role")))
        return shortened

    def _changes(self, role: str | None) -> Callable[[str], str]:
        match role:
            case "user":
                return lambda text: with_own_words(text, self._questions)
            case "assistant":
                return lambda text: self._written.get(text.strip()) or filled(text) or text
            case "tool" | None:
                return _result_text
        return lambda text: filled(text) or text


def _texts(value: Any) -> Iterator[str]:
    """All texts of JSON."""
    match value:
        case str():
            yield value
        case list():
            for part in value:
                yield from _texts(part)
        case dict():
            yield from _texts(list(value.values()))


def _everywhere(value: Any, change: Callable[[str], str]) -> Any:
    """JSON with all its texts changed."""
    match value:
        case str():
            return change(value)
        case list():
            return [_everywhere(part, change) for part in value]
        case dict():
            return {name: _everywhere(part, change) for name, part in value.items()}
    return value


def _mapped(content: Any, change: Callable[[str], str]) -> Any:
    """Content of a message with changed texts; results keep theirs but for reminders."""
    match content:
        case str():
            return change(content)
        case list():
            return [_mapped(part, change) for part in content]
        case {"type": "tool_result", "content": result}:
            return {**content, "content": _mapped(result, _result_text)}
        case {"text": str(text)}:
            return {**content, "text": change(text)}
    return content


def _head_text(text: str) -> str:
    """Filler, but for a header that the service reads."""
    if text.startswith(BILLING):
        return text
    return filled(text)


def _result_text(text: str) -> str:
    return REMINDER.sub(lambda found: filled(found[0]), text)


def _difference(path: str, body: JsonObject, earlier: Sequence[JsonObject]) -> RecordedRequest:
    """Request as the difference to the earlier one with most of its turns."""
    key = turns_key(path)
    n_kept, base = 0, None
    for i, other in enumerate(earlier):
        n_equal = sum(
            1
            for _ in takewhile(
                lambda pair: pair[0] == pair[1], zip(body[key], other.get(key, ()), strict=False)
            )
        )
        if n_equal >= max(1, n_kept):
            n_kept, base = n_equal, i
    known: JsonObject = {}
    if base is not None:
        known = earlier[base]
    return RecordedRequest(
        path=path.partition("?")[0],
        fields={k: v for k, v in body.items() if k != key and known.get(k) != v},
        turns=tuple(body[key][n_kept:]),
        said="",
        base=base,
        n_kept=n_kept,
        dropped=tuple(k for k in known if k not in body),
    )


def main(folder: str, *names: str) -> None:
    """Make the recordings of the sessions in a folder."""
    RECORDINGS.mkdir(exist_ok=True)
    for file in sorted(Path(folder).glob(f"*/{RAW}")):
        client = file.parent.name
        if names and client not in names:
            continue
        session = recorded(client, msgspec.json.decode(file.read_bytes(), type=RawSession))
        text = msgspec.json.format(msgspec.json.encode(session), indent=1)
        (RECORDINGS / f"{client}.json").write_bytes(text + b"\n")
        sys.stdout.write(f"{client}: {len(session.requests)} requests, {len(text)} bytes\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
