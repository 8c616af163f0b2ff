"""Tokenizers load, whatever the tables of mlx-lm's detokenizers make of their ids."""

import json
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import tokenizer_utils
from tokenizers import decoders

from mlxstack.engine.loading.tokenizer_wrapper import DETOKENIZERS, load_wrapper
from mlxstack.text.tokens.token_decoder import TokenDecoder
from tests.text.tokenizer_kinds import SPM, SPM_STRIPPED, sparse


@pytest.mark.parametrize("steps", [SPM, SPM_STRIPPED])
def test_a_hole_in_the_ids_loads_with_any_decoder(steps: tuple[Any, ...], tmp_path: Path) -> None:
    tokenizer = sparse()
    tokenizer.decoder = decoders.Sequence(list(steps))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_wrapper(tmp_path, {})
    tokens = loaded.encode("Hello brave world", add_special_tokens=False)
    assert max(tokens) > len(loaded)
    assert TokenDecoder(loaded).text(tokens) == "Hello brave world"


def test_the_detokenizers_of_mlx_lm_are_back_after_loading(tmp_path: Path) -> None:
    before = [getattr(tokenizer_utils, name) for name in DETOKENIZERS]
    with pytest.raises((OSError, ValueError)):
        load_wrapper(tmp_path, {})
    assert [getattr(tokenizer_utils, name) for name in DETOKENIZERS] == before
