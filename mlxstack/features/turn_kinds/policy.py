"""Kinds of turns by headers and prompts: the first matching row."""

import re
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.core.request import TurnKind, TurnReading

MAX_CHARS = 500
"""Characters of a system prompt in which a row's text begins and ends."""

SUBAGENT = TurnReading(TurnKind.SUBAGENT)
SCRIPT = TurnReading(TurnKind.SCRIPT)
HELPER = TurnReading(TurnKind.HELPER, drops_kv=True)
SUMMARY = TurnReading(TurnKind.PERSON, drops_kv=True)
"""Summary or commit message during a turn; the next prompt does not continue it."""


class TurnRow(Struct, frozen=True):
    """Turn of a client; all of its conditions hold."""

    name: str
    reading: TurnReading
    header: str = ""
    """Name of a header, in lower case."""
    value: str = ".*"
    """Regular expression of the whole value of the header."""
    system: str = ""
    """Text at the beginning of the system prompt."""
    user: str = ""
    """Beginning of the last message of the user."""
    property_name: str = ""
    """Property of the JSON schema of the answer."""
    max_tokens: int | None = None
    is_without_tools: bool = False


USER_AGENT = "user-agent"
CLAUDE = r"claude-cli/.*"

ROWS = (
    TurnRow(
        "quota probe of Claude Code", HELPER, USER_AGENT, CLAUDE,
        user="quota", max_tokens=1, is_without_tools=True,
    ),
    TurnRow(
        "title of Claude Code", HELPER, USER_AGENT, CLAUDE,
        property_name="title", is_without_tools=True,
    ),
    TurnRow("title of opencode", HELPER, system="You are a title generator."),
    TurnRow("summary of opencode", HELPER, system="Summarize what was done in this conversation."),
    TurnRow(
        "title of qwen-code", HELPER,
        system="Generate a concise, sentence-case title (3-7 words) that captures what this "
        "programming-assistant session is about.",
    ),
    TurnRow("title of Continue", HELPER, user="Given the following... please reply with a title"),
    TurnRow("summary of pi", SUMMARY, system="You are a context summarization assistant."),
    TurnRow(
        "commit message of aider", SUMMARY,
        system="You are an expert software engineer that generates concise, "
        "one-line Git commit messages",
    ),
    TurnRow(
        "summary of aider", SUMMARY,
        system="*Briefly* summarize this partial conversation about programming.",
    ),
    TurnRow("sub-agent of Claude Code", SUBAGENT, "x-claude-code-agent-id", ".+"),
    TurnRow("sub-agent of opencode", SUBAGENT, "x-parent-session-id", ".+"),
    TurnRow(
        "sub-agent of Codex", SUBAGENT, "x-openai-subagent", "collab_spawn|memory_consolidation",
    ),
    TurnRow("Claude Code in a script", SCRIPT, USER_AGENT, r"claude-cli/.*\(external, sdk-cli\b.*"),
    TurnRow("Codex in a script", SCRIPT, USER_AGENT, r"codex_exec/.*"),
)  # fmt: skip
"""Helpers first: those of a sub-agent or a script are helpers too."""


def read_turn(
    marks: Mapping[str, str],
    conversation: Conversation | None,
    max_tokens: int | None = None,
    property_names: Collection[str] = (),
) -> TurnReading | None:
    """Reading of the first row that matches; None where no row does.

    `marks` are headers, names in lower case; `property_names` those of the JSON schema of the
    answer.
    """
    messages: Sequence[Message] = ()
    has_tools = False
    if conversation is not None:
        messages = conversation.messages
        has_tools = bool(conversation.tools)
    systems = (message.text for message in messages if message.role is Role.SYSTEM)
    system = next(systems, "")[:MAX_CHARS]
    users = (message.text for message in reversed(messages) if message.role is Role.USER)
    user = next(users, "")
    for row in ROWS:
        if (
            _has_header(row, marks)
            and row.max_tokens in (None, max_tokens)
            and not (row.is_without_tools and has_tools)
            and (not row.property_name or row.property_name in property_names)
            and row.system in system
            and user.startswith(row.user)
        ):
            return row.reading
    return None


def _has_header(row: TurnRow, marks: Mapping[str, str]) -> bool:
    if not row.header:
        return True
    return re.fullmatch(row.value, marks.get(row.header, ""), re.DOTALL) is not None
