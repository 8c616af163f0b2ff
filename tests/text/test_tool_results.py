"""Tool results reach their calls, whatever order they arrive in."""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.conversation import Conversation, Message, Role, ToolCall
from mlxstack.text.assembly import assemble_text
from mlxstack.text.normalize_messages import INTERRUPTED, pair_results

SYSTEM = Role.SYSTEM
USER = Role.USER
ASSISTANT = Role.ASSISTANT
TOOL = Role.TOOL
ASKED = Message(USER, "Weather in Rome, Oslo and Ulm?")


def calling(*calls: str | tuple[str, str]) -> Message:
    """A turn of calls, each an id or an id and a name."""
    named = [call if isinstance(call, tuple) else (call, "weather") for call in calls]
    return Message(ASSISTANT, tool_calls=tuple(ToolCall(i, n, {"key": i}) for i, n in named))


def result(text: str, call_id: str | None = None, name: str | None = None) -> Message:
    return Message(TOOL, text, tool_call_id=call_id, name=name)


def texts(messages: Sequence[Message]) -> list[str]:
    """Texts of the results and users after pairing."""
    return [m.text for m in pair_results([ASKED, *messages])[1:] if m.role is not ASSISTANT]


def test_results_follow_the_order_of_their_calls() -> None:
    results = [result("rome", "a"), result("oslo", "b"), result("ulm", "c")]
    for order in permutations(results):
        assert texts([calling("a", "b", "c"), *order]) == ["rome", "oslo", "ulm"]


@pytest.mark.parametrize("fixture", ["chatml", "mistral"])
def test_two_orders_are_one_prompt(fixture: str, request: pytest.FixtureRequest) -> None:
    prompt_maker = assemble_text(request.getfixturevalue(fixture)).prompt_maker
    results = [result("rome", "a"), result("oslo", "b")]
    more = [Message(ASSISTANT, "Fine."), Message(USER, "Again")]
    for later in ([], more):
        prompts = {
            prompt_maker.make(Conversation((ASKED, calling("a", "b"), *order, *later))).tokens
            for order in permutations(results)
        }
        assert len(prompts) == 1
        assert prompt_maker.detokenize(*prompts).index("rome") < prompt_maker.detokenize(
            *prompts
        ).index("oslo")


def test_results_of_one_id_answer_its_calls_one_after_another() -> None:
    turns = [calling("a", "b", "a"), result("oslo", "b"), result("rome", "a"), result("ulm", "a")]
    assert texts(turns) == ["rome", "oslo", "ulm"]


def test_a_second_result_of_one_call_comes_last() -> None:
    turns = [calling("a", "b"), result("rome", "a"), result("again", "a"), result("oslo", "b")]
    assert texts(turns) == ["rome", "oslo", "again"]


def test_an_id_that_a_later_turn_uses_again_is_paired_per_turn() -> None:
    first = [calling(("a", "f"), ("b", "g")), result("2", "b"), result("1", "a")]
    second = [calling(("b", "h"), ("a", "k")), result("4", "a"), result("3", "b")]
    paired = pair_results([*first, *second])
    results = [(m.text, m.name) for m in paired if m.role is TOOL]
    assert results == [("1", "f"), ("2", "g"), ("3", "h"), ("4", "k")]
    assert paired[: len(first)] == pair_results(first)


def test_results_without_ids_are_paired_by_name_then_by_order() -> None:
    calls = calling(("a", "f"), ("b", "g"), ("c", "g"))
    assert texts([calls, result("2", name="g"), result("3", name="g"), result("1", name="f")]) == [
        "1", "2", "3",
    ]  # fmt: skip
    assert texts([calls, result("1"), result("2"), result("3", "c")]) == ["1", "2", "3"]


def test_calls_without_ids_get_one_by_position() -> None:
    turns = [calling("", ""), result("1"), result("2"), calling(""), result("3")]
    paired = pair_results(turns)
    assert [c.id for m in paired for c in m.tool_calls] == ["call_0", "call_1", "call_2"]
    assert [m.tool_call_id for m in paired if m.role is TOOL] == ["call_0", "call_1", "call_2"]


def test_texts_between_results_stay_in_their_places() -> None:
    turns = [calling("a", "b"), result("oslo", "b"), Message(USER, "well?"), result("rome", "a")]
    assert texts(turns) == ["rome", "well?", "oslo"]


def test_a_skipped_call_gets_a_result_that_says_so() -> None:
    assert texts([calling("a", "b"), result("oslo", "b")]) == [INTERRUPTED, "oslo"]
    assert texts([calling("a", "b"), result("rome", "a")]) == ["rome"]


def test_results_without_a_call_come_last_and_answer_none() -> None:
    turns = [calling("a", "b"), result("other", "z"), result("oslo", "b"), result("rome", "a")]
    assert texts(turns) == ["rome", "oslo", "other"]
    assert texts([calling("a"), result("other", "z")]) == ["other"]
    assert texts([result("other", "z")]) == ["other"]


def test_neighboring_assistant_turns_are_one_turn_of_calls() -> None:
    assert texts([calling("a"), calling("b"), result("oslo", "b"), result("rome", "a")]) == [
        "rome", "oslo",
    ]  # fmt: skip


def test_a_late_result_keeps_its_place_and_learns_its_name() -> None:
    turns = [calling("a"), Message(ASSISTANT, "Wait."), Message(USER, "so?"), result("rome", "a")]
    late = pair_results(turns)[-1]
    assert (late.text, late.name) == ("rome", "weather")


ids = st.sampled_from(["a", "b", "c", ""])
turns_st = st.lists(
    st.builds(Message, st.just(ASSISTANT), tool_calls=st.lists(
        st.builds(ToolCall, ids, st.sampled_from("fg"), st.just({})), max_size=3).map(tuple))
    | st.builds(Message, st.just(TOOL), st.sampled_from("12345"), tool_call_id=ids | st.none(),
                name=st.sampled_from("fgh") | st.none())
    | st.builds(Message, st.sampled_from([USER, SYSTEM]), st.just("u")),
    max_size=12,
)  # fmt: skip


@given(turns_st)
def test_pairing_loses_nothing_and_is_idempotent(turns: list[Message]) -> None:
    paired = pair_results(turns)
    assert pair_results(paired) == paired
    kept = [m.text for m in paired if m.text != INTERRUPTED]
    assert sorted(kept) == sorted(m.text for m in turns)


@given(turns_st, turns_st)
def test_an_answer_and_what_follows_it_change_no_earlier_turn(
    turns: list[Message], more: list[Message]
) -> None:
    answered = [*turns, Message(USER, "u"), Message(ASSISTANT, "answer")]
    paired: tuple[Any, ...] = pair_results(answered)
    assert pair_results([*answered, *more])[: len(paired)] == paired


@given(turns_st, st.randoms())
def test_any_order_of_known_results_is_one_conversation(turns: list[Message], random: Any) -> None:
    """Results with distinct ids, all of which calls of the turn have."""
    distinct = list(dict.fromkeys(call.id for m in turns for call in m.tool_calls if call.id))
    results = [result(f"r{call_id}", call_id) for call_id in distinct]
    calls = calling(*distinct)
    shuffled = random.sample(results, len(results))
    assert pair_results([calls, *shuffled]) == pair_results([calls, *results])
