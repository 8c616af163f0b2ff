"""Titles of agents: client and working directory from their prompts."""

import re
from pathlib import PurePosixPath, PureWindowsPath

from msgspec import Struct

from mlxstack.core.conversation import Conversation, Role

SEPARATOR = " · "
MOST_CHARS = 40
MOST_SCANNED = 200_000

CLIENTS = (
    ("claude", re.compile(r"\bClaude Code\b|\bClaude Agent SDK\b")),
    ("codex", re.compile(r"\bCodex\b")),
    ("opencode", re.compile(r"\bopencode\b", re.I)),
    ("qwen", re.compile(r"\bQwen Code\b|interactive CLI agent developed by Alibaba", re.I)),
    ("pi", re.compile(r"operating inside pi, a coding agent|\byou are pi\b", re.I)),
    ("aider", re.compile(r"Act as an expert software developer")),
)
"""Clients by words of their system prompts."""

FOLDER = re.compile(
    r"(?:<cwd>|working directory(?: is)?:|working in the directory:)[ \t]*[`\"']?"
    r"(?P<path>(?:/|~|[A-Za-z]:\\)[^\n<`\"']*)",
    re.I,
)
REMINDERS = re.compile(
    r"<(?P<tag>system-reminder|environment_context|user_instructions|session_context)>"
    r".*?(?:</(?P=tag)>|\Z)",
    re.S,
)


class AgentTitle(Struct, frozen=True):
    """`title` names the agent, `opening` are the first words of its prompt."""

    title: str
    opening: str = ""


def agent_title(conversation: Conversation, hint: str | None) -> AgentTitle:
    """Name an agent by client and folder, else by its first words."""
    messages = conversation.messages
    system = "\n".join(m.text for m in messages if m.role is Role.SYSTEM)[:MOST_SCANNED]
    user = next((m.text for m in messages if m.role is Role.USER), "")[:MOST_SCANNED]
    client, folder = _client(system, hint), _folder(system) or _folder(user)
    words = first_words(REMINDERS.sub("", user))
    parts = (client, folder) if folder else (client, words)
    title = SEPARATOR.join(part for part in parts if part)
    return AgentTitle(title, first_words(system) or words)


def first_words(text: str) -> str:
    """The beginning of a text, cut at a word."""
    line = " ".join(text[: 8 * MOST_CHARS].split())
    if len(line) <= MOST_CHARS:
        return line
    return line[: MOST_CHARS + 1].rpartition(" ")[0] or line[:MOST_CHARS]


def _client(system: str, hint: str | None) -> str:
    named = (hint or "").partition(":")[0]
    if named in {"claude", "codex", "opencode"}:
        return named
    return next((name for name, words in CLIENTS if words.search(system)), "")


def _folder(text: str) -> str:
    match = FOLDER.search(text)
    if match is None:
        return ""
    path = match["path"].strip()
    return (PureWindowsPath(path) if path[1:2] == ":" else PurePosixPath(path)).name
