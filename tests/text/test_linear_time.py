"""What a long text costs: work that grows with its length alone, and never for all threads."""

import threading
import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.core.errors import BadRequest
from mlxstack.features.formats.answer_format import ModelAnswerFormat
from mlxstack.text.assembly import assemble_text
from mlxstack.text.prompt import checkpoint_positions
from mlxstack.text.prompt.checkpoint_positions import turn_ends
from mlxstack.text.template import adaptation as settling
from mlxstack.text.template.adaptation import TemplateCapabilities, adapt_to_template
from mlxstack.text.template.variables import MAX_VARIABLES
from mlxstack.text.tokens.cached_tokenizer import CachedTokenizer
from mlxstack.text.tokens.special_tokens import special_tokens_of
from mlxstack.text.tokens.token_decoder import TokenDecoder


class Counting:
    """A tokenizer, and how often each of its attributes was asked for."""

    def __init__(self, tokenizer: Any) -> None:
        self.asked: Counter[str] = Counter()
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        self.asked[name] += 1
        return getattr(self._tokenizer, name)


class Joint(str):
    """Counts the letters that it joined."""

    n_joined = 0

    def join(self, parts: Any) -> str:
        joined = super().join(parts)
        Joint.n_joined += len(joined)
        return joined


def spent_s(text: str, first: str) -> float:
    """The least CPU seconds of this thread in three tries."""
    spent = []
    for _ in range(3):
        begun = time.thread_time()
        assert len(turn_ends(text, [(first, True), ("x", True)], len(text))) == 2
        spent.append(time.thread_time() - begun)
    return min(spent)


def test_a_turn_that_nearly_repeats_itself_is_found_as_fast_as_any() -> None:
    k = 10_000
    mean = "a" * k + "b" + "a" * k
    plain = "".join(map(str, range(k)))[: len(mean)]
    worst = spent_s(f"<u>{mean}<a>{'a' * 10 * k}<u>x<a>", mean)
    usual = spent_s(f"<u>{plain}<a>{'c' * 10 * k}<u>x<a>", plain)
    # CPU time against CPU time: the product of the lengths would be hundreds of times as much.
    assert worst < 50 * usual


@given(st.text("ab", max_size=40), st.lists(st.text("ab ", max_size=4), max_size=4), st.data())
def test_turns_are_found_where_they_stand_last(text: str, said: list[str], data: Any) -> None:
    end = data.draw(st.integers(0, len(text)))
    expected = []
    before = end
    for one in reversed([one.strip() for one in said]):
        if one and (start := text.rfind(one, 0, before)) >= 0:
            expected.append(start + len(one))
            before = start
    assert turn_ends(text, [(one, False) for one in said], end) == expected


def test_turns_that_are_nowhere_are_not_looked_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = [("begin", True), *[("rewritten", False)] * 20]
    assert turn_ends("begin " * 10, turns, 60) == [59]
    monkeypatch.setattr(checkpoint_positions, "MAX_IN_VAIN", 600)
    assert turn_ends("begin " * 10, turns, 60) == []
    assert turn_ends("begin " * 10, turns[:8], 60) == [59]


def test_the_table_of_added_tokens_is_made_once_for_all_pieces(chatml: Any) -> None:
    tokenizer = Counting(chatml)
    pieces = TokenDecoder(tokenizer)
    for token in range(300):
        pieces.of(token)
    assert tokenizer.asked["added_tokens_decoder"] == 1


@pytest.mark.parametrize(
    ("traits", "role"),
    [
        (TemplateCapabilities(needs_alternation=True), Role.USER),
        (TemplateCapabilities(has_late_system=False), Role.SYSTEM),
        (TemplateCapabilities(takes_user_after_tool=False), Role.USER),
    ],
)
def test_what_becomes_one_turn_is_joined_once(
    traits: TemplateCapabilities, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "TURN_JOINT", Joint("\n\n"))
    monkeypatch.setattr(Joint, "n_joined", 0)
    first = Message(Role.USER if role is Role.SYSTEM else Role.TOOL, "begin", tool_call_id="x")
    settled = adapt_to_template([first, *[Message(role, "say")] * 500], traits)
    assert len(settled) <= 2
    assert Joint.n_joined == sum(len(one.text) for one in settled if len(one.text) > 5)


def test_others_go_on_while_a_long_text_is_encoded(chatml: Any) -> None:
    """The tokenizer must let the interpreter go; a text of this length takes a while."""
    encoder = CachedTokenizer(chatml, special_tokens_of(chatml, ModelAnswerFormat(chatml)))
    n_breaths = 0
    is_over = threading.Event()

    def breathe() -> None:
        nonlocal n_breaths
        while not is_over.wait(0.001):
            n_breaths += 1

    other = threading.Thread(target=breathe)
    other.start()
    try:
        before = n_breaths
        encoder.encode("The quick brown fox jumps. " * 20_000)
        assert n_breaths - before > 10
    finally:
        is_over.set()
        other.join()


def test_variables_of_a_template_are_short_and_leave_little(chatml: Any) -> None:
    prompt_maker = assemble_text(chatml).prompt_maker
    hello = (Message(Role.USER, "hello"),)
    prompt_maker.make(Conversation(hello, template={"note": "x" * (MAX_VARIABLES - 20)}))
    assert all(len(key) == 16 for key in prompt_maker.template._openings)
    with pytest.raises(BadRequest, match="65536 are taken") as refused:
        prompt_maker.make(Conversation(hello, template={"note": "x" * MAX_VARIABLES}))
    assert refused.value.param == "chat_template_kwargs"
