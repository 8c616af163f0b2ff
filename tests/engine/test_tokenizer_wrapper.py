"""Tokenizers load, whatever the tables of mlx-lm's detokenizers make of their ids."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import tokenizer_utils
from tokenizers import decoders

from mlxstack.core.errors import SetupError
from mlxstack.demo import MODEL_DIR
from mlxstack.engine.loading.tokenizer_folder import load_tokenizer
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    shutil.copytree(MODEL_DIR, made, ignore=shutil.ignore_patterns("*.safetensors"))
    return made


def changed(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": None}, {"max_position_embeddings": None}, {"rms_norm_eps": "1e-5"},
        {"rope_parameters": [1]},
    ],
)  # fmt: skip
def test_a_tokenizer_does_not_hang_on_what_transformers_wants_of_config(
    folder: Path, changes: dict[str, Any]
) -> None:
    plain = load_tokenizer(folder)
    changed(folder / "config.json", **changes)
    found = load_tokenizer(folder)
    assert found.encode("Hello world") == plain.encode("Hello world")
    assert found.eos_token_ids == plain.eos_token_ids


def test_a_template_with_a_byte_order_mark_writes_none(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    text = file.read_text()
    file.write_text("\ufeff" + text)
    assert load_tokenizer(folder).chat_template == text


ABSENT = (("tokenizer.json", None),)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (ABSENT, r"holds no tokenizer\.json and no tokenizer\.model; get the model again"),
        (
            (*ABSENT, ("tekken.json", "{}")),
            r"tokenizer\.model \(tekken\.json is for mistral-common",
        ),
        ((*ABSENT, ("tokenizer.model", "x")), r"tokenizer\.model: .* with a tokenizer\.json"),
        ([("tokenizer.json", "{}")], "a file lacks 'added_tokens'"),
        ([("tokenizer.json", '{"version": "2.0"}')], "cannot be loaded: "),
        ([("special_tokens_map.json", "{")], r"special_tokens_map\.json is not what it should be"),
        ([("chat_template.json", "[]")], r"chat_template\.json holds no JSON object"),
        ([("chat_template.jinja", b"\xe9")], r"chat_template\.jinja is no text in UTF-8"),
    ],
)
def test_a_tokenizer_that_cannot_be_is_refused_by_its_file(
    folder: Path, files: Any, said: str
) -> None:
    for name, content in files:
        file = folder / name
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SetupError, match=said):
        load_tokenizer(folder)
