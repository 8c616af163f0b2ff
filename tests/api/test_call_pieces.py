"""Pieces of a call over HTTP: maximum three tokens behind what decides them, on real engines."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from msgspec import Struct, structs

from mlxstack.core.engine_snapshot import RequestPhase
from mlxstack.core.preset import ModelSpec, Preset, ServerSpec
from mlxstack.demo import MODEL_DIR
from tests.api.running import Running, running, single_steps
from tests.clients.scripted import HORIZON, OPENING, call
from tests.clients.stage import model, playing_model
from tests.features.formats.formats import FORMATS, template_of
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

MAX_LAG = 3
"""Tokens between one that decides a piece and the piece."""

WORDS = " ".join(f"w{n:02}" for n in range(14))
LONG = " ".join([WORDS] * 40)
ARGUMENTS = {"path": WORDS, "n": 3}
CALLS = {
    "demo": call("edit", **ARGUMENTS),
    "coder": f"<tool_call>\n<function=edit>\n<parameter=path>\n{WORDS}\n</parameter>\n"
    "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
    "keys": f"<tool_call>edit<arg_key>path</arg_key><arg_value>{WORDS}</arg_value>"
    "<arg_key>n</arg_key><arg_value>3</arg_value></tool_call>",
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["path", "n"],
}
FUNCTION: dict[str, Any] = {"name": "edit", "parameters": SCHEMA}
USER = [{"role": "user", "content": "Edit it."}]
CHAT: dict[str, Any] = {
    "messages": USER,
    "tools": [{"type": "function", "function": FUNCTION}],
    "stream": True,
}
Taken = Callable[[dict[str, Any]], str]


class Dialect(Struct, frozen=True):
    """A streamed request, and the piece of arguments in one of its events, or ""."""

    path: str
    body: dict[str, Any]
    piece: Taken


def _chat(event: dict[str, Any]) -> str:
    deltas = [choice["delta"] for choice in event["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    return "".join(call["function"].get("arguments") or "" for call in calls)


def _messages(event: dict[str, Any]) -> str:
    return str(event.get("delta", {}).get("partial_json", ""))


def _responses(event: dict[str, Any]) -> str:
    is_piece = event["type"] == "response.function_call_arguments.delta"
    return str(event["delta"]) if is_piece else ""


def _completion(event: dict[str, Any]) -> str:
    return str(event.get("content", ""))


PIECES = {
    "chat": Dialect("/v1/chat/completions", CHAT, _chat),
    "forced": Dialect("/v1/chat/completions", {**CHAT, "tool_choice": "required"}, _chat),
    "stop strings": Dialect("/v1/chat/completions", {**CHAT, "stop": ["w05", "</"]}, _chat),
    "messages": Dialect(
        "/v1/messages",
        {
            "messages": USER,
            "max_tokens": 500,
            "tools": [{"name": "edit", "input_schema": SCHEMA}],
            "stream": True,
        },
        _messages,
    ),
    "responses": Dialect(
        "/v1/responses",
        {"input": "Edit it.", "tools": [{"type": "function", **FUNCTION}], "stream": True},
        _responses,
    ),
    "llama-server": Dialect(
        "/completion",
        {"prompt": f"<|im_start|>user\nEdit it.<|im_end|>\n{OPENING}", "stream": True},
        _completion,
    ),
}


class Told:
    """What a client has read, in a thread of its own; it may leave early."""

    def __init__(self, url: str, dialect: Dialect, leaves_at: str | None = None) -> None:
        self.text, self.n_pieces, self.events = "", 0, list[dict[str, Any]]()
        self.is_over = False
        self._changed = threading.Condition()
        self._leaves_at = leaves_at
        self._thread = threading.Thread(target=self._read, args=(url, dialect))
        self._thread.start()

    def has(self, pieces: list[str]) -> bool:
        """Whether all these words come."""
        return self.wait(lambda: all(word in self.text for word in pieces))

    def wait(self, is_true: Callable[[], bool]) -> bool:
        """Whether this becomes true; the reader may have ended before."""
        with self._changed:
            return self._changed.wait_for(is_true, PATIENCE_S)

    def end(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _read(self, url: str, dialect: Dialect) -> None:
        body = {"model": "m", "temperature": 0, **dialect.body}
        try:
            with httpx.stream(
                "POST", f"{url}{dialect.path}", json=body, timeout=PATIENCE_S
            ) as answer:
                for line in answer.iter_lines():
                    self._take(line.removeprefix("data: "), dialect)
                    if self._leaves_at is not None and self._leaves_at in self.text:
                        return
        finally:
            with self._changed:
                self.is_over = True
                self._changed.notify_all()

    def _take(self, line: str, dialect: Dialect) -> None:
        if not line.startswith("{"):
            return
        event = json.loads(line)
        with self._changed:
            piece = dialect.piece(event)
            self.events.append(event)
            self.text += piece
            self.n_pieces += bool(piece)
            self._changed.notify_all()


@pytest.fixture(scope="module", params=CALLS)
def staged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Running]]:
    """A real engine whose model writes the call of one format, and the text of that call."""
    folder = tmp_path_factory.mktemp(request.param)
    said = CALLS[request.param]
    script = [
        {"when": "twice", "say": f"{said}\n{said}"},
        {"when": "for long", "say": said.replace(WORDS, LONG)},
        {"when": ".", "say": said},
    ]
    made = model(folder / "model", script)
    if request.param in FORMATS:
        (made / "chat_template.jinja").write_text(template_of(FORMATS[request.param]))
    with playing_model(made, folder, thinking=False) as found:
        yield said, found


def sampled(live: Running, said: str, dialect: Dialect) -> list[str]:
    """The texts of the tokens that the model samples, one by one."""
    tokenizer = live.service.engine.tokenizer
    # The first mark of a forced call is a part of the prompt.
    rest = said.removeprefix("<tool_call>") if "tool_choice" in dialect.body else said
    found = []
    while rest:
        ids = tokenizer.encode(rest[:HORIZON], add_special_tokens=False)
        text = str(tokenizer.decode(ids[:1]))
        found.append(text)
        rest = rest.removeprefix(text)
    return found


def n_decoded(live: Running) -> int:
    """Tokens of the one running request, after the last step."""
    slots = live.service.engine.snapshot().slots
    return max(one.n_decoded if one.state is RequestPhase.RUNNING else 0 for one in slots)


@pytest.mark.parametrize("dialect", PIECES.values(), ids=PIECES)
def test_each_piece_is_sent_within_three_tokens(
    staged: tuple[str, Running], dialect: Dialect
) -> None:
    """The engine stands still between two steps while the client gets all that is decided."""
    said, live = staged
    texts = sampled(live, said, dialect)
    told = Told(live.url, dialect)
    n_amid = 0
    assert WORDS in "".join(texts)
    with single_steps(live) as step:
        while not told.is_over:
            step()
            decided = "".join(texts[: max(0, n_decoded(live) - MAX_LAG)])
            known = [word for word in WORDS.split() if word in decided]
            assert told.has(known), (known, told.text[-80:])
            n_amid += 0 < len(known) < len(WORDS.split())
    told.end()
    assert n_amid and told.n_pieces > len(WORDS.split())
    if dialect.path != "/completion":
        assert json.loads(told.text) == ARGUMENTS


def test_logprobs_of_a_call_come_with_its_pieces(staged: tuple[str, Running]) -> None:
    """Every token of the call is noted once, in order, with a piece of the call or at its end."""
    said, live = staged
    told = Told(live.url, Dialect("/v1/chat/completions", {**CHAT, "logprobs": True}, _chat))
    told.end()
    choices = [one for event in told.events for one in event["choices"]]
    notes = [one["logprobs"]["content"] if one["logprobs"] else [] for one in choices]
    assert "".join(note["token"] for some in notes for note in some) == said
    assert all(note["logprob"] <= 0 for some in notes for note in some)
    with_pieces = [
        some for one, some in zip(choices, notes, strict=True) if _chat({"choices": [one]})
    ]
    assert sum(map(bool, with_pieces)) > len(WORDS.split())


def test_ollama_sends_a_call_as_soon_as_it_is_whole(staged: tuple[str, Running]) -> None:
    """Its clients take whole calls only; the first of two comes while the second is written."""
    said, live = staged
    body = {"messages": said_by_user("Edit twice."), "tools": CHAT["tools"], "think": False}
    dialect = Dialect("/api/chat", body, _whole_calls)
    n_first = len(sampled(live, said, dialect))
    told = Told(live.url, dialect)
    n_amid = 0
    with single_steps(live) as step:
        while not told.is_over:
            step()
            if n_decoded(live) >= n_first + MAX_LAG:
                assert told.wait(lambda: told.n_pieces > 0)
                n_amid += told.n_pieces == 1
    told.end()
    assert n_amid
    calls = [call for one in told.events for call in one["message"].get("tool_calls", ())]
    assert [call["function"]["arguments"] for call in calls] == [ARGUMENTS, ARGUMENTS]


@pytest.mark.parametrize("name", ["chat", "messages", "responses"])
def test_a_client_that_leaves_amid_a_call_ends_it(staged: tuple[str, Running], name: str) -> None:
    """The request is cancelled within its arguments, and the next one is whole."""
    said, live = staged
    dialect = PIECES[name]
    asked = {"input": "Edit for long."} if name == "responses" else {}
    asked = asked or {"messages": said_by_user("Edit for long.")}
    long = structs.replace(dialect, body={**dialect.body, "max_tokens": 9999, **asked})
    n_before = len(live.service.request_log.requests())
    told = Told(live.url, long, leaves_at="w05")
    told.end()
    assert "w05" in told.text and LONG not in told.text
    n_whole = len(sampled(live, said.replace(WORDS, LONG), long))
    while len(live.service.request_log.requests()) == n_before:
        threading.Event().wait(0.01)
    ended = live.service.request_log.requests()[0]
    assert (ended.ended, ended.n_generated < n_whole) == ("cancelled", True)
    again = Told(live.url, dialect)
    again.end()
    assert json.loads(again.text) == ARGUMENTS


def said_by_user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _whole_calls(event: dict[str, Any]) -> str:
    return "".join(map(json.dumps, event["message"].get("tool_calls", ())))


FIXED = {"type": "object", "properties": {"path": {"const": WORDS}}, "required": ["path"]}
FIXED_TOOL = {"name": "edit", "parameters": FIXED}
FORCED = {
    "chat": {
        "tools": [{"type": "function", "function": FIXED_TOOL}],
        "tool_choice": "required",
        "logprobs": True,
    },
    "messages": {
        "tools": [{"name": "edit", "input_schema": FIXED}],
        "tool_choice": {"type": "any"},
    },
    "responses": {"tools": [{"type": "function", **FIXED_TOOL}], "tool_choice": "required"},
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[str], Running]]:
    """The demo, and the texts of the tokens of its forced call."""
    preset = Preset(model=ModelSpec(id=str(MODEL_DIR)), server=ServerSpec(port=0))
    with running(preset, tmp_path_factory.mktemp("demo")) as live:
        told = Told(live.url, forced("chat"))
        told.end()
        choices = [one for event in told.events for one in event["choices"]]
        notes = [one["logprobs"]["content"] for one in choices if one["logprobs"]]
        yield [note["token"] for some in notes for note in some], live


def forced(name: str) -> Dialect:
    """A request of a dialect that the demo has to answer with one call."""
    return structs.replace(PIECES[name], body={**PIECES[name].body, **FORCED[name]})


@pytest.mark.parametrize("name", FORCED)
def test_the_demo_forced_to_a_call_sends_each_piece_in_time(
    demo: tuple[list[str], Running], name: str
) -> None:
    """The same tokens in every dialect, none of whose words is later than three tokens."""
    texts, live = demo
    assert WORDS in "".join(texts)
    told = Told(live.url, forced(name))
    n_amid = 0
    with single_steps(live) as step:
        while not told.is_over:
            step()
            decided = "".join(texts[: max(0, n_decoded(live) - MAX_LAG)])
            known = [word for word in WORDS.split() if word in decided]
            assert told.has(known), (known, told.text[-80:])
            n_amid += 0 < len(known) < len(WORDS.split())
    told.end()
    assert n_amid and json.loads(told.text) == {"path": WORDS}


def test_the_demo_tells_clients_of_ollama_a_call_before_the_end(
    demo: tuple[list[str], Running],
) -> None:
    """They take whole calls: one that is whole comes before the event that ends the answer."""
    city = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"]}
    weather = {"name": "get_weather", "description": "Get the weather of a city"}
    tools = [{"type": "function", "function": {**weather, "parameters": city}}]
    body = {"messages": said_by_user("What is the weather in Oslo?"), "tools": tools}
    told = Told(demo[1].url, Dialect("/api/chat", {**body, "think": False}, _whole_calls))
    told.end()
    calls = [one["message"].get("tool_calls", []) for one in told.events]
    assert [call["function"]["arguments"] for some in calls for call in some] == [{"city": "Oslo"}]
    assert [one["done"] for one in told.events] == [False] * (len(calls) - 1) + [True]
    assert not calls[-1]
