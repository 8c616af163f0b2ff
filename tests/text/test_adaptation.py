"""Conversations made fit for templates that refuse things."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.conversation import Message, Role
from mlxstack.text.template.adaptation import TemplateCapabilities, adapt_to_template

STRICT = TemplateCapabilities(
    has_late_system=False, needs_alternation=True, takes_user_after_tool=False
)
SYSTEM = Role.SYSTEM
USER = Role.USER
ASSISTANT = Role.ASSISTANT
TOOL = Role.TOOL

messages_st = st.lists(
    st.builds(Message, st.sampled_from(list(Role)), st.sampled_from(["", "a", "b\n"])), max_size=8
)


def said(*turns: tuple[Role, str]) -> list[Message]:
    return [Message(role, text) for role, text in turns]


def pairs(messages: tuple[Message, ...]) -> list[tuple[Role, str]]:
    return [(m.role, m.text) for m in messages]


def test_leading_system_messages_are_one_and_lose_the_billing_header() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.329.715;"
    settled = adapt_to_template(
        said((SYSTEM, header), (SYSTEM, "a"), (SYSTEM, "b"), (USER, "c")), TemplateCapabilities()
    )
    assert pairs(settled) == [(SYSTEM, "a\n\nb"), (USER, "c")]


def test_a12_late_system_stays_in_place_where_the_template_allows() -> None:
    turns = said((SYSTEM, "s"), (USER, "u"), (SYSTEM, "late"), (USER, "v"))
    assert adapt_to_template(turns, TemplateCapabilities()) == tuple(turns)


def test_a12_late_system_joins_the_turn_before_it() -> None:
    turns = said((SYSTEM, "s"), (USER, "u"), (SYSTEM, "late"), (ASSISTANT, "a"), (USER, "v"))
    assert pairs(adapt_to_template(turns, TemplateCapabilities(has_late_system=False))) == [
        (SYSTEM, "s"),
        (USER, "u\n\n<system-reminder>\nlate\n</system-reminder>"),
        (ASSISTANT, "a"),
        (USER, "v"),
    ]


def test_a12_late_system_after_an_answer_never_changes_an_older_turn() -> None:
    turns = said((USER, "u"), (ASSISTANT, "a"), (SYSTEM, "late"), (USER, "v"))
    assert pairs(adapt_to_template(turns, STRICT)) == [
        (USER, "u"),
        (ASSISTANT, "a"),
        (USER, "<system-reminder>\nlate\n</system-reminder>\n\nv"),
    ]


def test_a13_turns_are_merged_only_where_the_template_insists() -> None:
    turns = said((USER, "a"), (USER, "b"), (ASSISTANT, "c"), (TOOL, "1"), (TOOL, "2"))
    assert adapt_to_template(turns, TemplateCapabilities()) == tuple(turns)
    assert pairs(adapt_to_template(turns, STRICT)) == [
        (USER, "a\n\nb"),
        (ASSISTANT, "c"),
        (TOOL, "1"),
        (TOOL, "2"),
    ]


def test_a_template_without_system_role_hears_it_from_the_user() -> None:
    settled = adapt_to_template(
        said((SYSTEM, "s"), (USER, "u")), TemplateCapabilities(has_system=False)
    )
    assert pairs(settled) == [(USER, "s\n\nu")]


@given(messages_st, messages_st)
def test_a12_settling_is_append_only(old: list[Message], new: list[Message]) -> None:
    before = adapt_to_template(old, STRICT)
    after = adapt_to_template(old + new, STRICT)
    if not any(m.role is not SYSTEM for m in old):
        return
    kept = before[:-1]
    assert after[: len(kept)] == kept
    assert after[len(kept)].text.startswith(before[-1].text)


@given(messages_st)
def test_a13_strict_templates_never_see_two_users_in_a_row(turns: list[Message]) -> None:
    roles = [m.role for m in adapt_to_template(turns, STRICT)]
    assert all(not (a is b and a in (USER, ASSISTANT)) for a, b in pairwise(roles))
    assert SYSTEM not in roles[1:]
