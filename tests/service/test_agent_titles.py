"""Titles of agents, from the prompts that their clients send."""

import pytest

from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.service.parts.agent_registry import agent_title, first_words


def title(system: str, user: str = "Fix the login page.", hint: str | None = None) -> str:
    messages = (Message(Role.SYSTEM, system), Message(Role.USER, user))
    return agent_title(Conversation(messages), hint).title


@pytest.mark.parametrize(
    ("system", "user", "hint", "expected"),
    [
        (
            "You are Claude Code, Anthropic's official CLI.\n<env>\nWorking directory: "
            "/Users/ann/src/shop-api\nPlatform: darwin\n</env>",
            "hi", None, "claude · shop-api",
        ),
        (
            "You are an agent.\n - Primary working directory: /home/ann/shop api\n - more",
            "hi", "claude:1f", "claude · shop api",
        ),
        (
            "You are Codex, based on GPT-5.",
            "<environment_context>\n  <cwd>/srv/infra</cwd>\n</environment_context>",
            "codex:77", "codex · infra",
        ),
        (
            "You are opencode, an agent.\n<env>\n  Working directory: /work/web/\n</env>",
            "hi", None, "opencode · web",
        ),
        (
            "You are an interactive CLI agent developed by Alibaba Group",
            "This is the Qwen Code.\nI'm currently working in the directory: /tmp/lab\n",
            None, "qwen · lab",
        ),
        (
            "You are an expert coding assistant operating inside pi, a coding agent harness.\n"
            "Current working directory: C:\\src\\game",
            "hi", None, "pi · game",
        ),
        ("Be brief.", "Which day is it today?", None, "Which day is it today?"),
        ("Be brief.", "Which day is it?", "codex:1", "codex · Which day is it?"),
    ],
)  # fmt: skip
def test_a_title_is_client_and_folder_else_the_first_words(
    system: str, user: str, hint: str | None, expected: str
) -> None:
    assert title(system, user, hint) == expected


def test_reminders_of_a_client_are_no_first_words() -> None:
    user = "<system-reminder>\nToday is Tuesday.\n</system-reminder>\nRename the module."
    assert title("Be brief.", user) == "Rename the module."


def test_first_words_end_at_a_word() -> None:
    text = first_words("You are a careful\n\n assistant who answers every question in full")
    assert text == "You are a careful assistant who answers"
    assert len(first_words("x" * 1000)) <= 40


def test_the_opening_of_a_prefix_is_the_system_prompt() -> None:
    messages = (Message(Role.SYSTEM, "You review code."), Message(Role.USER, "hi"))
    assert agent_title(Conversation(messages), None).opening == "You review code."
