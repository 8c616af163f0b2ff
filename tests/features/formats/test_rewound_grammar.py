"""A grammar state that took tokens back goes on as if they had never come."""

import json
from random import Random
from typing import Any

import pytest
from llguidance import LLMatcher

from mlxstack.demo import MODEL_DIR
from mlxstack.features.formats.grammar.constraint import (
    ConstraintLayout,
    GrammarConstraint,
    GrammarState,
)
from mlxstack.text.grammar.compiler import GrammarCompiler
from mlxstack.text.grammar.json_rules import JsonRules
from mlxstack.text.grammar.lark_builder import LarkBuilder
from tests.features.formats.test_forced_tool_call import tokens_in

pytestmark = pytest.mark.slow
SCHEMA = """{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9},
"kinds": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3}},
"required": ["name", "kinds"], "additionalProperties": false}"""


ORDERED = LLMatcher.grammar_from_json_schema(SCHEMA, {"whitespace_flexible": False})


def unordered(schema: dict[str, Any]) -> str:
    """Grammar of an object whose members come in any order, as in a call."""
    builder = LarkBuilder({})
    return LLMatcher.grammar_from_lark(builder.grammar(JsonRules(builder, schema).value(schema)))


def allowed(mask: bytes | None, n_vocab: int) -> list[int]:
    if mask is None:
        return list(range(n_vocab))
    return tokens_in(mask, n_vocab)


@pytest.mark.parametrize(
    "more", [{}, {"is_in_thinking": True, "budget": 6}, {"opens": {3}, "escapes": {4}}], ids=str
)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("grammar", [ORDERED, unordered(json.loads(SCHEMA))], ids=["json", "call"])
def test_rewound_it_is_as_before(grammar: str, seed: int, more: dict[str, object]) -> None:
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(MODEL_DIR)
    random = Random(seed)
    n_vocab = tokenizer.vocab_size
    compiler = GrammarCompiler(tokenizer, n_vocab)
    rules = compiler.compile(grammar, "schema")
    eos = frozenset(tokenizer.eos_token_ids)
    layout = ConstraintLayout(
        n_vocab, eos, closes=(5, 6), forbidden=((8, 9),), **{k: _frozen(v) for k, v in more.items()}
    )
    constraint = GrammarConstraint(layout, rules)
    one = constraint.start()
    other = constraint.start()
    for _ in range(25):
        position = one.position()
        for _ in range(random.randrange(4)):
            if not _step(one, random, n_vocab, eos):
                break
        one.rewind(position)
        assert one.mask() == other.mask()
        assert one.is_ruled == other.is_ruled
        assert list(one.forced_tokens()) == list(other.forced_tokens())
        token = _step(one, random, n_vocab, eos)
        if token is None:
            break
        other.advance(token)


def test_forced_tokens_may_come_in_this_order() -> None:
    from mlx_lm.utils import load_tokenizer

    tokenizer = load_tokenizer(MODEL_DIR)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    rules = compiler.compile(ORDERED, "schema")
    layout = ConstraintLayout(tokenizer.vocab_size, frozenset(tokenizer.eos_token_ids))
    state = GrammarConstraint(layout, rules).start()
    forced = state.forced_tokens()
    assert "name" in tokenizer.decode(forced)
    for token in forced:
        assert token in allowed(state.mask(), tokenizer.vocab_size)
        state.advance(token)
    assert GrammarConstraint(layout).start().forced_tokens() == []


def _step(state: GrammarState, random: Random, n_vocab: int, eos: frozenset[int]) -> int | None:
    """Go on with a random allowed token; None where only the end is left."""
    tokens = [token for token in allowed(state.mask(), n_vocab) if token not in eos]
    if not tokens:
        return None
    token = random.choice(tokens)
    state.advance(token)
    return token


def _frozen(value: object) -> object:
    return frozenset(value) if isinstance(value, set) else value
