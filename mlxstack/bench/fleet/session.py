"""Recorded sessions of coding agents: requests, pauses, lengths of answers.

A file holds one session as JSON. Texts that are not ours stand as `[[CHARACTERS:SEED]]` and become
filler of that length, the same for the same seed.
"""

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mlxstack.core.errors import SetupError

JsonObject = dict[str, Any]

FOLDER = Path(__file__).parent / "sessions"
FILLER = re.compile(r"\[\[(\d+):([0-9a-f]+)\]\]")
WORDS = (
    *("the", "is", "a", "of", "to", "and", "in", "file", "that", "it", "for", "with", "on", "as"),
    *("when", "use", "tool", "not", "be", "this", "command", "should", "or", "path", "code", "if"),
    *("read", "write", "only", "user", "before", "line", "text", "result", "must", "by", "edit"),
)
CHARS_PER_TOKEN = 3.5
"""Rough, for the choice of sessions that fit a context."""


class RecordedRequest(Struct, frozen=True, omit_defaults=True):
    """One request of a session."""

    messages: tuple[JsonObject, ...]
    """Messages after the kept ones, in the form of OpenAI's chats."""
    n_answer: int
    """Tokens of the answer."""
    n_kept: int = 0
    """Messages of the thread's request before with which this one begins."""
    pause_s: float = 0.0
    """Seconds of tools and of the client since the answer before."""
    tools: tuple[JsonObject, ...] | None = None
    """Tools offered from here on; None: as before."""
    thread: int = 0
    """Conversation of the session: 0 is the main one, others are sub-agents."""
    leave_after: int = 0
    """Pieces of the answer after which the client closes the connection; 0: it stays."""


class RecordedSession(Struct, frozen=True):
    """Session of one client, its requests in order."""

    client: str
    requests: tuple[RecordedRequest, ...]


class PromptedRequest(Struct, frozen=True):
    """Request with its whole history."""

    messages: tuple[JsonObject, ...]
    tools: tuple[JsonObject, ...]
    n_answer: int
    pause_s: float
    leave_after: int

    @property
    def n_tokens(self) -> int:
        """Tokens of prompt and answer, estimated from the characters."""
        characters = len(msgspec.json.encode((self.messages, self.tools)))
        return round(characters / CHARS_PER_TOKEN) + self.n_answer


def sessions(folder: Path = FOLDER) -> tuple[RecordedSession, ...]:
    """Sessions of a folder by name, with filler in its place.

    Raises SetupError for a folder without sessions, or a file that is none.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise SetupError(f"{folder} has no sessions (*.json)")
    return tuple(_read(file) for file in files)


def _read(file: Path) -> RecordedSession:
    try:
        text = FILLER.sub(lambda mark: filler(int(mark[1]), mark[2]), file.read_text())
        return msgspec.json.decode(text, type=RecordedSession)
    except (OSError, ValueError) as error:
        raise SetupError(f"{file} is no recorded session ({error})") from error


def filler(n_chars: int, seed: str) -> str:
    """Words of `n_chars` characters, the same for the same seed."""
    chosen = random.Random(seed).choices(WORDS, k=n_chars // 3 + 1)
    return " ".join(chosen)[:n_chars]


def requests(session: RecordedSession, run: str, agent: int) -> Iterator[PromptedRequest]:
    """Requests of one agent of a run, whose prompts name both.

    Agents of one run share their heads; those of different runs share nothing.
    """
    threads: dict[int, list[JsonObject]] = {}
    tools: dict[int, tuple[JsonObject, ...]] = {}
    for recorded in session.requests:
        history = threads.get(recorded.thread, [])[: recorded.n_kept]
        begins = not any(message["role"] == "user" for message in history)
        new_messages = list(recorded.messages)
        if not history:
            new_messages[0] = _prefixed(new_messages[0], f"Run {run}.")
        if begins:
            position = _first_user(new_messages)
            new_messages[position] = _prefixed(new_messages[position], f"Agent {agent}.")
        threads[recorded.thread] = [*history, *new_messages]
        if recorded.tools is not None:
            tools[recorded.thread] = recorded.tools
        yield PromptedRequest(
            tuple(threads[recorded.thread]),
            tools.get(recorded.thread, ()),
            recorded.n_answer,
            recorded.pause_s,
            recorded.leave_after,
        )


def _first_user(messages: Sequence[JsonObject]) -> int:
    users = (i for i, message in enumerate(messages) if message["role"] == "user")
    return next(users, len(messages) - 1)


def _prefixed(message: JsonObject, text: str) -> JsonObject:
    return {**message, "content": f"{text} {message.get('content') or ''}"}
