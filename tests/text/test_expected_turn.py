"""The expected beginning of the next prompt: equal to the real one, whatever is said then."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.text.prompt.prompt import UNKNOWN, PromptMaker
from tests.features.replay.test_answer_replay import ACT, ASK, CALL, Model, result
from tests.text.conftest import CHATML_ADDED, CHATML_SPECIAL, byte_level, loaded
from tests.text.stripping import STRIPPING

Load = Callable[[str], Model]
N_CLOSE = 8
"""Tokens between an answer and the words after it: the end of the turn, the next header."""


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    def made(template: str) -> Model:
        tokenizer = byte_level(CHATML_SPECIAL, CHATML_ADDED)
        folder: Path = tmp_path_factory.mktemp("stripping")
        return Model(loaded(folder, tokenizer, template, {"eos_token": "<|im_end|>"}))

    return made


@pytest.fixture(scope="module", params=STRIPPING)
def model(request: pytest.FixtureRequest, load: Load) -> Model:
    return load(STRIPPING[request.param])


def loop(model: Model, n_calls: int) -> tuple[list[Message], Message]:
    """The turns of a tool loop with thoughts, and its last answer."""
    turns = [Message(Role.SYSTEM, "Be brief."), ASK]
    for step in range(n_calls):
        said, _ = model.sample(turns, f"I think {step}.\n\n</think>\nLook {step}:\n{CALL}")
        turns += [said, result(said)]
    said, _ = model.sample(turns, "All is known now.</think>\n\nIt is done.")
    return turns, said


def expected(model: Model, turns: list[Message], answer: Message) -> tuple[int, ...]:
    return model.prompt_maker.expected(Conversation(tuple(turns), tools=(ACT,)), answer).tokens


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(min_size=1), n_calls=st.integers(0, 3))
def test_a_prompt_begins_as_expected_whatever_the_user_says(
    model: Model, text: str, n_calls: int
) -> None:
    turns, answer = loop(model, n_calls)
    begun = expected(model, turns, answer)
    real = model.prompt([*turns, answer, Message(Role.USER, text)]).tokens
    assert real[: len(begun)] == begun
    unsaid = model.prompt([*turns, answer, Message(Role.USER, UNKNOWN)]).tokens
    n_words = len(model.encode(UNKNOWN)) + len(model.encode("<|im_end|>\n<|im_start|>assistant\n"))
    assert len(begun) >= len(unsaid) - n_words - N_CLOSE, "nearly all of it is known"


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.text(min_size=1))
def test_a_prompt_begins_as_expected_whatever_a_tool_returns(model: Model, text: str) -> None:
    turns, _ = loop(model, 1)
    answer, _ = model.sample(turns, f"Once more.\n</think>\n{CALL}\n{CALL}")
    begun = expected(model, turns, answer)
    results = [Message(Role.TOOL, text, tool_call_id=one.id) for one in answer.tool_calls]
    real = model.prompt([*turns, answer, *results]).tokens
    assert real[: len(begun)] == begun


def test_a_tool_loop_is_expected_to_go_on_from_what_is_cached(load: Load) -> None:
    model = load(STRIPPING["never"])
    turns, _ = loop(model, 1)
    answer, cached = model.sample(turns, f"Once more.\n</think>\n{CALL}\n{CALL}")
    assert expected(model, turns, answer)[: len(cached)] == cached


def test_thoughts_are_gone_when_the_user_is_expected(model: Model) -> None:
    turns, answer = loop(model, 2)
    said = model.prompt_maker.detokenize(expected(model, turns, answer))
    assert "I think" not in said
    assert "Look 1" in said
    assert "It is done." in said
    assert UNKNOWN not in said


def test_a_client_that_drops_thoughts_is_expected_too(model: Model) -> None:
    turns, answer = loop(model, 2)
    begun = expected(model, turns, answer)
    bare = [Message(m.role, m.text, None, m.tool_calls, m.tool_call_id) for m in [*turns, answer]]
    real = model.prompt([*bare, Message(Role.USER, "And now?")]).tokens
    assert real[: len(begun)] == begun


def test_checkpoints_lie_within(model: Model) -> None:
    turns, answer = loop(model, 2)
    made = model.prompt_maker.expected(Conversation(tuple(turns), tools=(ACT,)), answer)
    assert made.checkpoint_positions
    assert made.checkpoint_positions[-1] < len(made.tokens)


def test_a_message_that_holds_the_sentinel_shortens_the_expectation(load: Load) -> None:
    model = load(STRIPPING["loop"])
    turns = [Message(Role.USER, f"What is {UNKNOWN}?")]
    answer, _ = model.sample(turns, "Hm.</think>\n\nA word.")
    begun = expected(model, turns, answer)
    real = model.prompt([*turns, answer, Message(Role.USER, "I see.")]).tokens
    assert real[: len(begun)] == begun


def test_a_template_that_drops_the_last_message_expects_nothing(load: Load) -> None:
    model = load("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}")
    prompt_maker: PromptMaker = model.prompt_maker
    found = prompt_maker.expected(Conversation((ASK,)), Message(Role.ASSISTANT, "Yes."))
    assert found.tokens == ()
