"""Clients' own names for their conversations."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.api.caller import MAX_CHARS, client_name, session_hint
from mlxstack.policy.kv.conversation_id import ConversationNamer, is_implicit

UUID = "666f79cf-f11b-4765-854a-1165bd7cdb94"
CLAUDE = {"x-claude-code-session-id": UUID}


@pytest.mark.parametrize(
    ("headers", "key", "user", "expected"),
    [
        ({}, None, None, None),
        (CLAUDE, None, None, f"claude:{UUID}"),
        ({**CLAUDE, "x-claude-code-agent-id": "a4b"}, "k", "u", f"claude:{UUID}/a4b"),
        ({"session-id": "s", "thread-id": "t"}, "t", None, "codex:t"),
        ({"session-id": "s"}, None, None, "codex:s"),
        ({"x-session-id": "ses_1"}, "k", None, "opencode:ses_1"),
        ({"x-session-affinity": "ses_2"}, None, None, "opencode:ses_2"),
        ({}, "k", "u", "key:k"),
        ({}, None, "ann", "user:ann"),
        ({}, "", "  ", None),
        ({}, {"odd": 1}, ["odd"], None),
        ({}, None, json.dumps({"device_id": "d", "session_id": UUID}), f"claude:{UUID}"),
        ({}, None, f"user_abc_account_def_session_{UUID}", f"claude:{UUID}"),
        ({}, None, '{"session_id": 5}', 'user:{"session_id": 5}'),
        ({}, None, "[" * 100_000, "user:" + "[" * (MAX_CHARS - 5)),
    ],
)
def test_x30_who_says_what(
    headers: dict[str, str], key: Any, user: Any, expected: str | None
) -> None:
    assert session_hint(headers, key, user) == expected
    names = [ConversationNamer().name((digest * 8,), expected) for digest in ("0a1b", "ffff")]
    assert all(is_implicit(name) for name in names)


@given(st.dictionaries(st.sampled_from([*CLAUDE, "thread-id"]), st.text()), st.text(), st.text())
def test_a_hint_is_short_whatever_is_sent(headers: dict[str, str], key: str, user: str) -> None:
    found = session_hint(headers, key, user)
    assert found is None or 0 < len(found) <= MAX_CHARS


@pytest.mark.parametrize(
    ("agent", "client"),
    [
        ("claude-cli/2.1.329 (external, cli)", "claude-cli"),
        ("codex_exec/0.169.0 (Debian 12.0.0; x86_64)", "codex_exec"),
        ("curl", "curl"),
        ("", ""),
        (None, ""),
    ],
)
def test_a_client_is_known_by_its_product(agent: str | None, client: str) -> None:
    assert client_name({} if agent is None else {"user-agent": agent}) == client


def test_the_name_of_a_client_is_bounded() -> None:
    assert len(client_name({"user-agent": "x" * 100_000})) == MAX_CHARS
