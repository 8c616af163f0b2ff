"""Conversations are told apart by what was said; hints only decide between equals."""

from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.policy.kv import conversation_id
from mlxstack.policy.kv.conversation_id import ConversationNamer, user_turn_digests


def talk(*said: str, system: str = "You code.", salt: str = "") -> tuple[str, ...]:
    """User turns with an answer after each but the last."""
    turns = [Message(Role.SYSTEM, system)]
    for text in said:
        turns += [Message(Role.USER, text), Message(Role.ASSISTANT, f"about {text}")]
    return user_turn_digests(Conversation(tuple(turns[:-1])), salt)


def test_b9_a_growing_history_is_one_agent() -> None:
    names = ConversationNamer()
    first = names.name(talk("hello"), None)
    assert names.name(talk("hello", "and then"), None) == first
    assert names.name(talk("hello", "and then", "more"), None) == first


def test_b9_the_same_system_with_another_first_turn_is_another_agent() -> None:
    names = ConversationNamer()
    assert names.name(talk("fix the tests"), None) != names.name(talk("write a poem"), None)
    assert names.name(talk("a"), None) != names.name(talk("a", system="You sing."), None)


def test_b9_one_hint_does_not_join_two_conversations() -> None:
    names = ConversationNamer()
    main = names.name(talk("fix", "go on"), "opencode:s1")
    title = names.name(talk("fix", system="Write a title."), "opencode:s1")
    assert title != main
    assert names.name(talk("fix", "go on", "more"), "opencode:s1") == main


def test_two_sessions_that_begin_alike_are_two_agents() -> None:
    names = ConversationNamer()
    one = names.name(talk("hi"), "claude:a")
    two = names.name(talk("hi"), "claude:b")
    assert one != two
    assert names.name(talk("hi", "same"), "claude:a") == one
    assert names.name(talk("hi", "same"), "claude:b") == two
    assert names.name(talk("hi", "same", "x"), "claude:b") == two


def test_a_conversation_continued_under_another_hint_stays_itself() -> None:
    names = ConversationNamer()
    first = names.name(talk("hi"), "claude:a")
    assert names.name(talk("hi", "next day"), "claude:z") == first


def test_a_branch_is_another_agent_until_its_client_says_otherwise() -> None:
    names = ConversationNamer()
    first = names.name(talk("hi", "left", "on"), None)
    assert names.name(talk("hi", "right"), None) != first
    mine = names.name(talk("yo", "one", "two"), "codex:t")
    assert names.name(talk("yo", "one"), "codex:t") == mine


def test_d23_under_another_salt_the_same_words_are_another_agent() -> None:
    names = ConversationNamer()
    found = [names.name(talk("hi", salt=salt), None) for salt in ("", "one", "two")]
    assert len({name.partition(".")[0] for name in found}) == 3
    again = [names.name(talk("hi", "more", salt=salt), "claude:a") for salt in ("", "one", "two")]
    assert again == found


def test_names_that_are_given_have_a_form_of_their_own() -> None:
    names = ConversationNamer()
    found = [names.name(talk("hi"), hint) for hint in ("claude:a", "claude:b", "key:c")]
    assert found[1] == f"{found[0]}.2"
    assert all(conversation_id.is_implicit(name) for name in found)
    others = ("claude-mine", "night-20261121", "chat-0a1b2c3", "chat-0a1b2c3d.", "chat-0A1B2C3D")
    assert not any(conversation_id.is_implicit(name) for name in others)


def test_a_tool_result_is_a_turn_and_a_late_rule_is_none() -> None:
    user = Message(Role.USER, "u")
    tool = Message(Role.TOOL, "42")
    late = Message(Role.SYSTEM, "7 tokens left")
    assert len(user_turn_digests(Conversation((user, tool)))) == 2
    assert user_turn_digests(Conversation((user, late))) == user_turn_digests(Conversation((user,)))


def test_names_are_bounded_and_possible_agent_ids() -> None:
    names = ConversationNamer()
    for n in range(conversation_id.MAX_KNOWN + 50):
        name = names.name(talk(f"turn {n}"), "key:anything at all / ü")
        assert name.startswith("key-") and name.isascii() and len(name) < 128
    assert len(names._known) == conversation_id.MAX_KNOWN


def test_a_long_conversation_keeps_its_name_and_little_of_what_it_was_told() -> None:
    names = ConversationNamer()
    turns = tuple(f"{n:032x}" for n in range(conversation_id.MAX_TURNS + 500))
    first = names.name(turns, "codex:a")
    assert names.name((*turns, "more"), "codex:a") == first
    assert names.name((*turns, "more"), "codex:b") != first
    assert names.name((*turns, "more", "still"), None) == first
    assert names.name(turns[:-200], "codex:a") == first
    assert names.name((*turns[:100], "else"), None) != first
    assert max(len(one.turns) for one in names._known.values()) == conversation_id.MAX_TURNS


def test_the_expected_name_is_the_one_that_follows() -> None:
    names = ConversationNamer()
    sequence = [
        (talk("hi"), None), (talk("hi"), None), (talk("hi", "on"), "claude:a"),
        (talk("hi"), "claude:b"), (talk("yo"), "claude:b"), (talk("yo", "on"), None),
    ]  # fmt: skip
    for turns, hint in sequence:
        assert names.expected(turns, hint) == names.name(turns, hint)
