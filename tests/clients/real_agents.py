"""Real coding agents on a real model: a guided repair of a small project.

`python -m tests.clients.real_agents MODEL FOLDER [CLIENT ...]` starts each client on this model
with three questions: read a file, edit it, run the tests. It writes what the model answered to
`FOLDER/CLIENT.json` and prints what was done. A model that is too weak is told apart from a service
that fails: the first writes an answer without a call, or a wrong one; the second an error.
`tests.clients.agent_recorder` makes recordings for the tests of what lies in FOLDER then.

MLX_STACK_TEST_PATIENCE_S bounds each question; a model of 0.5B needs 900 s on two cores for a
client whose prompt has 17,000 tokens.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from mlxstack.core.conversation import Message, Role
from tests.api.running import Running
from tests.cli.terminal import CLI
from tests.clients.agent_recorder import RAW, raw_session, sampled_texts
from tests.clients.agents import AIDER, CODEX_EXEC, GENERATIONS, PROGRAMS, environment, project
from tests.clients.fleet_recordings import CLAUDE, conversation_of, write_project
from tests.clients.relay import Exchange, Relay, relaying
from tests.clients.stage import PROGRAMS as PYTHON_PROGRAMS
from tests.clients.stage import ended, playing_model
from tests.patience import PATIENCE_S

N_CTX = 32768
MAX_TEXT = 600
"""Characters of a tool result that are kept."""
READ = "Read the file inventory.py and tell me the names of its classes."
EDIT = (
    "The method add in inventory.py sets the pieces; it must add them. Edit inventory.py: replace "
    "`article.pieces = pieces` by `article.pieces += pieces`."
)
TEST = "Run the command `python3 -m unittest` and tell me whether the tests pass."
STEPS = (READ, EDIT, TEST)


class RealClient(Struct, frozen=True):
    """Client with the arguments of its first and of further questions, `{}` for the text."""

    name: str
    first: tuple[str, ...]
    later: tuple[str, ...]


EDITING = (*AIDER, "{}", "inventory.py")
CLIENTS = (
    RealClient("pi", ("-p", "{}"), ("-p", "--continue", "{}")),
    RealClient("aider", EDITING, ("--restore-chat-history", *EDITING)),
    RealClient("qwen", ("--yolo", "{}"), ("--continue", "--yolo", "{}")),
    RealClient("codex", (*CODEX_EXEC, "{}"), ("exec", "resume", "--last", *CODEX_EXEC[1:], "{}")),
    RealClient("opencode", ("run", "{}"), ("run", "--continue", "{}")),
    RealClient("claude", (*CLAUDE, "{}"), (*CLAUDE, "--continue", "{}")),
)


class AgentCall(Struct, frozen=True):
    """Call of a tool as the client read it."""

    name: str
    arguments: object


class AgentMessage(Struct, frozen=True):
    """Answer of the model, or result of a tool, without the client's own words."""

    role: str
    text: str
    calls: tuple[AgentCall, ...] = ()


class AgentStep(Struct, frozen=True):
    """One question to a client, and what came of it."""

    question: str
    is_done: bool
    """Whether the file was read, its tests pass, or they ran."""
    seconds: float
    n_requests: int
    n_errors: int
    """Answers of the service with a status of 400 or more."""
    messages: tuple[AgentMessage, ...]
    printed: str
    """Last words of the client."""


class AgentSession(Struct, frozen=True):
    """Session of one client."""

    client: str
    steps: tuple[AgentStep, ...]


def play(client: RealClient, live: Running, folder: Path) -> AgentSession:
    """Ask a client the three questions, in a project of its own.

    What went to and fro is written to `folder`, with the texts as the model wrote them.
    """
    place = project(folder)
    write_project(place)
    steps = []
    n_known = 0
    with sampled_texts(live) as texts, relaying(Relay(live.url)) as relay:
        for question in STEPS:
            arguments = client.later if steps else client.first
            began = time.monotonic()
            before = len(relay.exchanges)
            printed = _printed(client.name, relay.url, folder, arguments, question)
            exchanges = [e for e in relay.exchanges[before:] if _is_generation(e)]
            messages = _messages(exchanges, place)
            steps.append(
                AgentStep(
                    question=question,
                    is_done=_is_done(question, messages[n_known:], printed, place),
                    seconds=round(time.monotonic() - began, 1),
                    n_requests=len(exchanges),
                    n_errors=sum(1 for e in exchanges if (e.status or 0) >= 400),
                    messages=messages[n_known:],
                    printed=printed.replace(str(place), "/project")[-MAX_TEXT:],
                )
            )
            n_known = len(messages)
            raw = raw_session(place, STEPS, relay.exchanges, texts)
            (folder / RAW).write_bytes(msgspec.json.encode(raw))
    return AgentSession(client.name, tuple(steps))


def _printed(client: str, url: str, folder: Path, arguments: tuple[str, ...], question: str) -> str:
    command = [*CLI, "run", client, "--url", url, "--", *(a.format(question) for a in arguments)]
    own = environment(folder, MLX_STACK_HOME=str(folder / "mlx-stack"))
    folders = (PYTHON_PROGRAMS / "bin", PROGRAMS, own["PATH"])
    variables = {
        **own,
        "PATH": os.pathsep.join(map(str, folders)),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    try:
        done = ended(command, project(folder), **variables)
    except subprocess.TimeoutExpired:
        return f"no end after {PATIENCE_S:g} s"
    return done.stdout or done.stderr


def _is_generation(exchange: Exchange) -> bool:
    return exchange.method == "POST" and exchange.path.partition("?")[0] in GENERATIONS


def _messages(exchanges: list[Exchange], place: Path) -> tuple[AgentMessage, ...]:
    """Answers and results in the longest history of these requests."""
    histories = [conversation_of(exchange).messages for exchange in exchanges]
    longest = max(histories, key=len, default=())
    kept = (m for m in longest if m.role in (Role.ASSISTANT, Role.TOOL))
    return tuple(_message(message, place) for message in kept)


def _message(message: Message, place: Path) -> AgentMessage:
    calls = tuple(AgentCall(call.name, call.arguments) for call in message.tool_calls)
    text = message.text.replace(str(place), "/project")
    if message.role is Role.TOOL:
        text = text[:MAX_TEXT]
    return AgentMessage(message.role.value, text, calls)


def _is_done(question: str, messages: tuple[AgentMessage, ...], printed: str, place: Path) -> bool:
    results = " ".join(m.text for m in messages if m.role == Role.TOOL.value)
    if question == READ:
        return "class Article" in results or "Article" in printed
    if question == EDIT:
        return ended([sys.executable, "-m", "unittest"], place).returncode == 0
    return "Ran 4 tests" in results


def main(model: str, folder: str, *names: str) -> None:
    """Play the clients on a service of this model, and print a table."""
    with playing_model(Path(model).resolve(), Path(folder, "service"), N_CTX) as live:
        play_all(live, Path(folder), names)


def play_all(live: Running, folder: Path, names: Sequence[str]) -> None:
    """Play these clients, by default all; write their sessions."""
    table = Table("Client", "Step", "Done", "Seconds", "Requests", "Errors", "Calls")
    for client in CLIENTS:
        if names and client.name not in names:
            continue
        place = folder / client.name
        place.mkdir(parents=True, exist_ok=True)
        session = play(client, live, place)
        text = msgspec.json.format(msgspec.json.encode(session), indent=1)
        (folder / f"{client.name}.json").write_bytes(text)
        for name, step in zip(("read", "edit", "test"), session.steps, strict=True):
            calls = ", ".join(call.name for message in step.messages for call in message.calls)
            table.add_row(
                client.name,
                name,
                "yes" if step.is_done else "no",
                f"{step.seconds:.0f}",
                str(step.n_requests),
                str(step.n_errors),
                calls,
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
