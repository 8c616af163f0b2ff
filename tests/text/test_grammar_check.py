"""Compiling a grammar takes bounded time and memory, whatever schema a client sends."""

from itertools import pairwise
from typing import Any

import pytest

from mlxstack.core.errors import BadRequest
from mlxstack.features.formats.grammar import client_grammars
from mlxstack.features.formats.grammar.client_grammars import ClientGrammars
from mlxstack.text.grammar import compiler as grammar_compiler
from mlxstack.text.grammar.compiler import GrammarCompiler
from mlxstack.text.grammar.schema_grammar import ResponseConstraint
from mlxstack.text.grammar.schema_grammar import grammar_of as grammars_of

PRIMES = (7, 11, 13, 17, 19, 23)
PRODUCT = {"allOf": [{"type": "integer", "multipleOf": p} for p in PRIMES]}
MANY = {
    "type": "object",
    "properties": {f"k{i}": {"type": "integer", "multipleOf": 9000 + i} for i in range(500)},
}


@pytest.fixture
def compiler(chatml: Any) -> GrammarCompiler:
    return GrammarCompiler(chatml, len(chatml))


WIDE = {f"property_{n}": {"type": "string"} for n in range(6000)}
"""Properties of an object that llguidance compiles for many seconds."""


def compiled(compiler: GrammarCompiler, schema: dict[str, Any]) -> Any:
    return compiler.compile(grammars_of(ResponseConstraint(schema)), "response_format")


@pytest.mark.parametrize("multiple", [10_001, 50_000_017, 1.0001, 123456e-12, 1e22, -20_000])
def test_a_multiple_of_many_digits_is_refused(multiple: float) -> None:
    for schema in (
        {"type": "number", "multipleOf": multiple},
        {"type": "object", "properties": {"a": {"items": [{"multipleOf": multiple}]}}},
    ):
        with pytest.raises(BadRequest, match="multipleOf is"):
            grammars_of(ResponseConstraint(schema))


@pytest.mark.parametrize("multiple", [1, 5000, 10_000, 0.01, 0.25, 1e-9, 2.5, True, "x"])
def test_usual_multiples_are_taken(multiple: Any) -> None:
    assert grammars_of(ResponseConstraint({"type": "number", "multipleOf": multiple}))
    assert grammars_of(ResponseConstraint({"enum": [{"multipleOf": 10**9}]}))
    assert grammars_of(ResponseConstraint({"properties": {"multipleOf": {"type": "string"}}}))


def test_a_grammar_that_compiles_for_too_long_is_refused_and_the_next_one_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = ClientGrammars(1000)
    escaped = 'start: %json {"allOf": [' + ", ".join(
        f'{{"type": "integer", "multiple\\u004ff": {p}}}' for p in PRIMES
    )
    for shape in (
        ResponseConstraint({"type": "object", "properties": WIDE}),
        ResponseConstraint(PRODUCT),
        ResponseConstraint(MANY),
        ResponseConstraint(grammar=f"{escaped}]}}"),
    ):
        monkeypatch.setattr(client_grammars, "LIMIT_S", 0.3)
        for _ in range(2):
            with pytest.raises(BadRequest, match=r"takes longer than 0.3 s"):
                grammars.of_shape(shape)
        monkeypatch.setattr(client_grammars, "LIMIT_S", 20)
        assert grammars.of_shape(ResponseConstraint({"type": "integer", "multipleOf": 7})).text


def test_kept_grammars_are_bounded_by_bytes(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_compiler, "MAX_BYTES", 10_000_000)
    large = [{"enum": [f"{letter}{i}" for i in range(3000)]} for letter in "abcdefghijklmnop"]
    sizes = []
    for schema in large:
        compiled(compiler, schema)
        sizes.append(compiler.n_bytes)
    assert sizes[0] > 1_000_000 and max(sizes) <= 10_000_000
    assert any(after <= before for before, after in pairwise(sizes)), "some were dropped"
