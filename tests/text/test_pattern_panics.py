"""A tokenizer whose pattern gives up refuses a text in words."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from mlxstack.core.errors import BadRequest
from mlxstack.features.formats.output_format import OutputFormat
from mlxstack.text.assembly import assemble_text
from mlxstack.text.grammar.vocabulary import text_encoder
from mlxstack.text.prompt.prompt import TokenizeOptions
from tests.features.formats.formats import Format, made_tokenizer

ENDLESS = {"Regex": r"(a*)*(a*)*(a*)*\1b|."}
LONG = "a" * 300 + "!"


@pytest.fixture
def tokenizer() -> Any:
    """Tokenizer with a pattern that backtracks without end on many equal letters."""
    made = made_tokenizer(Format(""))
    data = json.loads(made.backend_tokenizer.to_str())
    split = {"type": "Split", "pattern": ENDLESS, "behavior": "Isolated", "invert": False}
    before = data["pre_tokenizer"]
    data["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, *([before] * bool(before))],
    }
    made._tokenizer._tokenizer = Tokenizer.from_str(json.dumps(data))
    return made


def test_a_pattern_that_gives_up_is_a_refusal(tokenizer: Any) -> None:
    prompt_maker = assemble_text(tokenizer).prompt_maker
    with pytest.raises(BadRequest, match="the tokenizer of this model gives up"):
        prompt_maker.tokenize(LONG, TokenizeOptions())
    assert prompt_maker.tokenize("Hello", TokenizeOptions())
    with pytest.raises(BadRequest, match="gives up"):
        OutputFormat(tokenizer)._tokens(LONG)


def test_forced_text_has_no_tokens_of_a_pattern_that_gives_up(tokenizer: Any) -> None:
    encode = text_encoder(tokenizer)
    assert encode(LONG) == []
    assert encode("Hello")
