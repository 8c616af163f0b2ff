"""Imagined agents: the same seed says the same, members of a team share a head."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mlxstack.bench.dev.workload import (
    AT_LENGTH,
    Split,
    Yardstick,
    agent,
    next_turn,
    question,
    real_text,
    sibling,
)
from mlxstack.core.errors import Broken
from mlxstack.demo import MODEL_DIR

YARD = Yardstick(word=1.0, tool=100.0)


def test_k6_the_default_prompt_is_2000_1500_500_50() -> None:
    body = agent(Split(), YARD, team=1, member=1)
    system, *turns, new = body["messages"]
    assert len(system["content"].split()) == 2000
    assert len(body["tools"]) == 15
    assert sum(len(turn["content"].split()) for turn in turns) == 500
    assert len(new["content"].split()) == 50
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2


def test_the_same_seed_says_the_same() -> None:
    assert agent(Split(), YARD, 3, 4) == agent(Split(), YARD, 3, 4)
    assert question(40, YARD, "x") == question(40, YARD, "x")
    assert question(40, YARD, "x") != question(40, YARD, "y")


def test_members_share_the_head_and_teams_share_nothing() -> None:
    one, two, other = (agent(Split(), YARD, *who) for who in ((1, 1), (1, 2), (2, 1)))
    assert one["messages"][0] == two["messages"][0]
    assert one["tools"] == two["tools"]
    assert one["messages"][1] != two["messages"][1]
    assert one["messages"][0] != other["messages"][0]
    assert one["tools"] != other["tools"]


@given(st.integers(100, 100_000))
def test_a_scaled_split_keeps_proportions_and_the_new_turn(total: int) -> None:
    split = Split().scaled(total)
    assert split.new == 50
    assert total - 3 <= split.total <= total
    assert abs(split.system / 4 - split.tools / 3) <= 1


def test_a_yardstick_turns_tokens_into_words() -> None:
    text = question(300, Yardstick(word=1.5), "x")["messages"][0]["content"].split()
    assert len(text) == 200


def test_the_next_turn_repeats_everything_before_it() -> None:
    body = agent(Split(), YARD, 1, 1)
    later = next_turn(body, "so it is", 20, YARD, "t")
    n = len(body["messages"])
    assert later["messages"][:n] == body["messages"]
    assert later["tools"] == body["tools"]
    assert later["messages"][n] == {"role": "assistant", "content": "so it is"}
    assert later["messages"][n + 1]["role"] == "user"


def test_a_sibling_shares_the_head_only() -> None:
    body = agent(Split(), YARD, 1, 1)
    other = sibling(body, 50, YARD, "s")
    assert other["messages"][0] == body["messages"][0]
    assert other["tools"] == body["tools"]
    assert len(other["messages"]) == 2


def test_real_text_has_the_tokens_that_were_asked_for_and_no_special_ones(tmp_path: Path) -> None:
    real = real_text(MODEL_DIR)
    yard = Yardstick(real=real)
    body = agent(Split(50, 40, 20, 10).without_tools, yard, team=1, member=1)
    system, *_, new = body["messages"]
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    for said, n_tokens in ((system["content"], 90), (new["content"], 10)):
        assert said in real.text and "tools" not in body
        assert abs(len(tokenizer.encode(said, add_special_tokens=False)) - n_tokens) <= 3
    assert question(9, yard, "x") == question(9, yard, "x")
    assert question(9, yard, "x")["messages"][0]["content"].startswith(AT_LENGTH)
    assert "<|" not in real.text
    with pytest.raises(Broken, match=r"no tokenizer\.json"):
        real_text(tmp_path)
