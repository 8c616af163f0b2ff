"""Record sessions of real clients for `mlx-stack bench fleet`.

`python -m tests.clients.fleet_recordings FOLDER` starts each client of npm on a scripted model: it
lists, reads and repairs a small project, runs its tests, and answers a second question. Words of
vendors (system prompts, descriptions of tools, reminders) are replaced by filler of their length.
"""

import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.api.dialects.anthropic.request_schema import MessagesBody
from mlxstack.api.dialects.anthropic.to_conversation import conversation as from_messages
from mlxstack.api.dialects.openai_chat.request_schema import ChatBody
from mlxstack.api.dialects.openai_chat.to_conversation import conversation as from_chat
from mlxstack.api.dialects.openai_responses.request_schema import ResponsesBody
from mlxstack.api.dialects.openai_responses.to_conversation import conversation as from_responses
from mlxstack.api.dialects.openai_responses.tool_names import toolbox
from mlxstack.bench.fleet import wire
from mlxstack.bench.fleet.session import JsonObject, RecordedRequest, RecordedSession
from mlxstack.bench.fleet.wire import FleetDialect
from mlxstack.core.conversation import Conversation, Message, Role, Tool
from tests.clients.agents import CODEX_EXEC, N_CTX, generations, project, start
from tests.clients.relay import Exchange, Relay, relaying
from tests.clients.scripted import call
from tests.clients.stage import Script, playing

CHARS_PER_TOKEN = 3.5
MIN_ANSWER = 8
MIN_FILLED = 16
"""Characters; less stands for nothing."""
REMINDER = re.compile(r"<system-reminder>.*?</system-reminder>", re.DOTALL)
TASK = "The tests of the inventory fail. Find the reason, mend it and run them again."
SECOND = "Now add a method that lists what is below a limit, with a test."
LIST = "ls -l | cut -c1-10,40-"
RUN_TESTS = "python3 -m unittest -v 2>&1 | sed 's/ in [0-9.]*s//'"
OWN_WORDS = (TASK, SECOND)

INVENTORY = '''"""Stock of a small shop, by article."""

from dataclasses import dataclass, field


@dataclass
class Article:
    """Article with its price in cents and the pieces in stock."""

    name: str
    price: int
    pieces: int = 0


@dataclass
class Inventory:
    """All articles by name."""

    articles: dict[str, Article] = field(default_factory=dict)

    def add(self, name: str, price: int, pieces: int = 1) -> Article:
        """Add pieces of an article; a new price replaces the old one."""
        article = self.articles.setdefault(name, Article(name, price))
        article.price = price
        article.pieces = pieces
        return article

    def take(self, name: str, pieces: int = 1) -> int:
        """Take pieces out of the stock; return what they cost together.

        Raises KeyError for an unknown article, ValueError for more pieces than there are.
        """
        article = self.articles[name]
        if pieces > article.pieces:
            raise ValueError(f"{name}: {article.pieces} pieces in stock, {pieces} asked for")
        article.pieces -= pieces
        return pieces * article.price

    def value(self) -> int:
        """Value of the whole stock in cents."""
        return sum(article.price * article.pieces for article in self.articles.values())
'''
TESTS = """import unittest

from inventory import Inventory


class InventoryTests(unittest.TestCase):
    def setUp(self) -> None:
        self.inventory = Inventory()
        self.inventory.add("screw", 5, 100)
        self.inventory.add("hammer", 1250, 3)

    def test_take_returns_the_cost(self) -> None:
        self.assertEqual(self.inventory.take("screw", 20), 100)

    def test_take_more_than_there_is(self) -> None:
        with self.assertRaises(ValueError):
            self.inventory.take("hammer", 4)

    def test_value(self) -> None:
        self.assertEqual(self.inventory.value(), 100 * 5 + 3 * 1250)

    def test_pieces_add_up(self) -> None:
        self.inventory.add("screw", 6, 50)
        self.assertEqual(self.inventory.articles["screw"].pieces, 150)
        self.assertEqual(self.inventory.articles["screw"].price, 6)


if __name__ == "__main__":
    unittest.main()
"""
README = """# Inventory

Stock of a small shop, by article. Prices are in cents.

- `inventory.py`: articles, and what can be done with them
- `test_inventory.py`: run them with `python3 -m unittest -v`
"""
REPAIRED = ("        article.pieces = pieces\n", "        article.pieces += pieces\n")
ADDED = (
    "    def value(self) -> int:\n",
    "    def below(self, limit: int) -> list[Article]:\n"
    '        """Articles of which fewer than `limit` pieces are left, the fewest first."""\n'
    "        scarce = [a for a in self.articles.values() if a.pieces < limit]\n"
    "        return sorted(scarce, key=lambda article: article.pieces)\n\n"
    "    def value(self) -> int:\n",
)
ADDED_TEST = (
    "    def test_value(self) -> None:\n",
    "    def test_below_lists_the_fewest_first(self) -> None:\n"
    '        self.inventory.add("nail", 1, 2)\n'
    "        names = [article.name for article in self.inventory.below(10)]\n"
    '        self.assertEqual(names, ["nail", "hammer"])\n\n'
    "    def test_value(self) -> None:\n",
)


class ClientTools(Struct, frozen=True):
    """Arguments of a client's tools, `{}` for the value; one without `edit` uses its shell."""

    shell: tuple[str, str]
    read: tuple[str, str] | None = None
    edit: tuple[str, str, str, str] | None = None
    edit_list: str = ""
    """Argument that holds the pairs of an edit."""
    shell_arguments: dict[str, str] = {}
    """Arguments of each command beside it."""

    def run(self, command: str) -> str:
        """Call that runs a command."""
        tool, argument = self.shell
        return call(tool, **{argument: command, **self.shell_arguments})

    def show(self, path: str) -> str:
        """Call that reads a file."""
        if self.read is None:
            return self.run(f"cat {path}")
        tool, argument = self.read
        return call(tool, **{argument: path})

    def replace(self, path: str, change: tuple[str, str]) -> str:
        """Call that replaces a text of a file."""
        before, after = change
        if self.edit is None:
            script = f"import pathlib; p = pathlib.Path({path!r}); s = p.read_text()"
            script += f"; p.write_text(s.replace({before!r}, {after!r}, 1)); print('edited', p)"
            return self.run(f"python3 - <<'EOF'\n{script}\nEOF")
        tool, path_name, old_name, new_name = self.edit
        pair = {old_name: before, new_name: after}
        if self.edit_list:
            return call(tool, **{path_name: path, self.edit_list: [pair]})
        return call(tool, **{path_name: path, **pair})


class RecordedClient(Struct, frozen=True):
    """Client with the arguments of its two questions, `{}` for the text."""

    name: str
    tools: ClientTools
    first: tuple[str, ...]
    second: tuple[str, ...]


CLAUDE = ("-p", "--dangerously-skip-permissions")
CLIENTS = (
    RecordedClient(
        "pi",
        ClientTools(
            ("bash", "command"),
            ("read", "path"),
            ("edit", "path", "oldText", "newText"),
            edit_list="edits",
        ),
        ("-p", "{}"),
        ("-p", "--continue", "{}"),
    ),
    RecordedClient(
        "codex",
        ClientTools(("exec_command", "cmd")),
        (*CODEX_EXEC, "{}"),
        ("exec", "resume", "--last", *CODEX_EXEC[1:], "{}"),
    ),
    RecordedClient(
        "claude",
        ClientTools(
            ("Bash", "command"),
            ("Read", "file_path"),
            ("Edit", "file_path", "old_string", "new_string"),
            shell_arguments={"description": "Run it"},
        ),
        (*CLAUDE, "{}"),
        (*CLAUDE, "--continue", "{}"),
    ),
    RecordedClient(
        "opencode",
        ClientTools(
            ("bash", "command"),
            ("read", "filePath"),
            ("edit", "filePath", "oldString", "newString"),
        ),
        ("run", "{}"),
        ("run", "--continue", "{}"),
    ),
)


def script(tools: ClientTools, folder: Path) -> Script:
    """Answers of the model, each found by the result before it."""
    code = str(folder / "inventory.py")
    tests = str(folder / "test_inventory.py")
    steps = (
        ("tests of the inventory fail", f"I look at the project first.\n{tools.run(LIST)}"),
        ("lists what is below", f"I add the method before `value`.\n{tools.replace(code, ADDED)}"),
        ("Ran 5 tests.*OK", "`below` lists scarce articles, the fewest first. All tests pass."),
        (
            "Ran 4 tests.*OK",
            "`add` replaced the pieces in stock. It adds them now; all tests pass.",
        ),
        ("Ran 4 tests.*FAILED", f"Pieces do not add up. I read the code.\n{tools.show(code)}"),
        ("below_lists_the_fewest", f"Now I run all tests.\n{tools.run(RUN_TESTS)}"),
        ("def below", f"Then its test.\n{tools.replace(tests, ADDED_TEST)}"),
        ("class InventoryTests", f"I run them first.\n{tools.run(RUN_TESTS)}"),
        (
            "class Inventory",
            f"`add` sets the pieces in place of adding them.\n{tools.replace(code, REPAIRED)}",
        ),
        ("Stock of a small shop, by article. Prices", tools.show(tests)),
        ("README.md", tools.show(str(folder / "README.md"))),
        ("pieces \\+= pieces", f"I run the tests.\n{tools.run(RUN_TESTS)}"),
        (".", "I do not know how to go on."),
    )
    return [{"when": pattern, "say": text} for pattern, text in steps]


def write_project(place: Path) -> None:
    """Write the project of the sessions."""
    (place / "inventory.py").write_text(INVENTORY)
    (place / "test_inventory.py").write_text(TESTS)
    (place / "README.md").write_text(README)


def record(client: RecordedClient, folder: Path) -> RecordedSession:
    """Session of one client, whose work is real and whose model is scripted."""
    place = project(folder)
    write_project(place)
    stage = folder / "stage"
    with (
        playing(stage, script(client.tools, place), N_CTX) as live,
        relaying(Relay(live.url)) as relay,
    ):
        for arguments, text in ((client.first, TASK), (client.second, SECOND)):
            argv = [word.format(text) for word in arguments]
            start(client.name, relay.url, folder, *argv)
    exchanges = generations(relay.exchanges)
    return RecordedSession(client.name, tuple(_recorded(exchanges, str(place))))


def _recorded(exchanges: Sequence[Exchange], place: str) -> Iterator[RecordedRequest]:
    """Requests as the messages that each adds to those before it in its thread."""
    threads: list[tuple[list[JsonObject], list[JsonObject]]] = []
    ended = exchanges[0].began
    for exchange in exchanges:
        conversation = conversation_of(exchange)
        messages = [_chat_message(message, place) for message in conversation.messages]
        tools = [_chat_tool(tool) for tool in conversation.tools if not tool.is_deferred]
        thread = _thread(messages, threads)
        if thread == len(threads):
            threads.append(([], []))
        before, tools_before = threads[thread]
        n_equal = _n_equal(before, messages)
        yield RecordedRequest(
            messages=tuple(messages[n_equal:]),
            n_answer=max(MIN_ANSWER, round(_n_chars(exchange) / CHARS_PER_TOKEN)),
            n_kept=n_equal,
            pause_s=round(max(0.0, exchange.began - ended), 2),
            tools=tuple(tools) if tools != tools_before else None,
            thread=thread,
        )
        threads[thread] = (messages, tools)
        ended = exchange.ended


def _thread(
    messages: list[JsonObject], threads: Sequence[tuple[list[JsonObject], list[JsonObject]]]
) -> int:
    """Thread whose system prompt and first question this continues, or the next number."""
    for number, (before, _) in enumerate(threads):
        if before[:2] == messages[:2]:
            return number
    return len(threads)


def _n_equal(before: Sequence[JsonObject], after: Sequence[JsonObject]) -> int:
    pairs = zip(before, after, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def conversation_of(exchange: Exchange) -> Conversation:
    """Conversation of a request in the dialect of its path."""
    match exchange.path.partition("?")[0]:
        case "/v1/messages":
            return from_messages(msgspec.convert(exchange.json, MessagesBody))
        case "/v1/responses":
            body = msgspec.convert(exchange.json, ResponsesBody)
            return from_responses(body, toolbox(body))
    return from_chat(msgspec.convert(exchange.json, ChatBody))


def _chat_message(message: Message, place: str) -> JsonObject:
    """A message in OpenAI's form, without words of vendors and paths of this machine."""
    text = message.text.replace(place, "/project")
    if message.role is Role.SYSTEM:
        return {"role": "system", "content": filled(text)}
    if message.role is Role.USER:
        return {"role": "user", "content": with_own_words(text, OWN_WORDS)}
    if message.role is Role.TOOL:
        content = REMINDER.sub(lambda found: filled(found[0]), text)
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": content}
    answer: JsonObject = {"role": "assistant", "content": text}
    if message.tool_calls:
        answer["tool_calls"] = [
            {
                "id": tool_call.id,
                "type": "function",
                "function": {
                    "name": tool_call.name,
                    "arguments": json.dumps(tool_call.arguments).replace(place, "/project"),
                },
            }
            for tool_call in message.tool_calls
        ]
    return answer


def with_own_words(text: str, own_words: Sequence[str]) -> str:
    """What we asked stays; the client's words around it are filler."""
    for own in own_words:
        if own in text:
            before, _, after = text.partition(own)
            return "\n".join(part for part in (filled(before), own, filled(after)) if part)
    return filled(text)


def _chat_tool(tool: Tool) -> JsonObject:
    function = {
        "name": tool.name,
        "description": filled(tool.description),
        "parameters": without_descriptions(tool.parameters),
    }
    return {"type": "function", "function": function}


def without_descriptions(schema: Any, key: str = "") -> Any:
    match schema:
        case dict():
            return {name: without_descriptions(part, name) for name, part in schema.items()}
        case list():
            return [without_descriptions(part, key) for part in schema]
        case str() if key == "description":
            return filled(schema)
    return schema


def filled(text: str) -> str:
    """Mark of filler in the place of a text."""
    if len(text.strip()) < MIN_FILLED:
        return ""
    return f"[[{len(text)}:{hashlib.sha256(text.encode()).hexdigest()[:8]}]]"


def _n_chars(exchange: Exchange) -> int:
    """Characters of an answer, its thoughts and calls."""
    dialect = FleetDialect.ANTHROPIC if "messages" in exchange.path else FleetDialect.OPENAI
    events = [(0.0, bytes(exchange.answer))]
    if "responses" in exchange.path:
        deltas = re.findall(rb'"delta":("(?:[^"\\]|\\.)*")', exchange.answer)
        return sum(len(json.loads(delta)) for delta in deltas)
    return len(wire.read(events, dialect).text)


def main(folder: Path, names: Sequence[str]) -> None:
    """Record all clients, or those of `names`, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for client in CLIENTS:
        if names and client.name not in names:
            continue
        with tempfile.TemporaryDirectory(prefix="fleet-") as scratch:
            session = record(client, Path(scratch))
        text = msgspec.json.format(msgspec.json.encode(session), indent=1)
        (folder / f"{client.name}.json").write_bytes(text + b"\n")
        sys.stdout.write(f"{client.name}: {len(session.requests)} requests, {len(text)} bytes\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
