"""Files of a model folder that no honest author wrote are refused with their name and a reason."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from mlxstack.core.errors import SetupError
from mlxstack.models.bounded_json import MAX_FILE_BYTES
from mlxstack.models.folder_check import check_folder
from mlxstack.models.local_models import _config
from mlxstack.models.model_files import INDEX, measured, read_config
from tests.models import LLAMA

DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000


def header(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_hidden_layers": 10**8}, "num_hidden_layers is 100000000, at most 10000"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is no number"),
        ({"text_config": {"num_hidden_layers": 10**8}}, "num_hidden_layers is 100000000"),
        ({"encoder_layers": 10**9}, "encoder_layers is"),
        ({"max_position_embeddings": float("inf")}, "max_position_embeddings is inf"),
        ({"vocab_size": float("nan")}, "vocab_size is nan"),
        ({"hidden_size": 2**50}, "hidden_size is"),
        ({"num_experts": 10**12}, "num_experts is"),
        ({"text_config": [1]}, "text_config is no object"),
        ({"quantization": 4}, "quantization is no object"),
    ],
)
def test_a_config_of_impossible_numbers_is_refused(
    tmp_path: Path, changed: dict[str, Any], reason: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | changed))
    for check in (read_config, check_folder):
        with pytest.raises(SetupError, match=reason):
            check(tmp_path)
    assert _config(tmp_path) == {}


def test_odd_numbers_of_published_configs_are_taken(tmp_path: Path) -> None:
    odd = {
        "time_step_limit": [0.0, float("inf")], "pad_token_id": -1, "num_key_value_heads": None,
        "rope_theta": 1e9, "intermediate_size": [1, 2], "max_length": 10**30, "layers": [1, 2],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | odd))
    assert read_config(tmp_path).config["max_length"] == 10**30


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json"]
)
@pytest.mark.parametrize("data", [
        DEEP, b"[" * 100_000 + b"]" * 100_000, b"{", b"[1]", b"\xff", b"\xef\xbb\xbf{}",
        "{}".encode("utf-16"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / name).write_bytes(data)
    with pytest.raises(SetupError, match=name):
        check_folder(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        header(DEEP), header(b'{"w": 1}'), header(b'{"w": {"dtype": "F32"}}'), header(b"[1]"),
        header(b'{"w": {"dtype": "F32", "data_offsets": [0, "8"]}}'), struct.pack("<Q", 2**63), b"",
        header(b'{"w": {"dtype": [], "data_offsets": [0, 8]}}'),
    ],
)  # fmt: skip
def test_a_damaged_header_of_weights_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(SetupError, match=r"model\.safetensors"):
        measured(tmp_path)


def test_an_index_of_odd_values_names_no_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(header(b"{}"))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": [1, 2]}')
    assert measured(tmp_path) is not None


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_file_that_is_too_long_is_not_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(header(b"{}"))
    with (tmp_path / name).open("ab") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(SetupError, match=rf"{name} has 32 MiB, at most 32 are taken"):
        read_config(tmp_path)


def test_a_header_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    with weights.open("wb") as file:
        file.write(struct.pack("<Q", MAX_FILE_BYTES + 1) + b'{"a": 1')
        file.truncate(MAX_FILE_BYTES + 9)
    with pytest.raises(SetupError, match=r"model\.safetensors is damaged: it has 32 MiB, at most"):
        measured(tmp_path)


def test_a_tokenizer_that_makes_much_of_little_is_refused(tmp_path: Path) -> None:
    def rules(n: int, pattern: dict[str, str]) -> dict[str, Any]:
        replace = {"type": "Replace", "pattern": pattern, "content": "a" * 10}
        return {"type": "Sequence", "normalizers": [{"type": "NFC"}, *[replace] * n]}

    file = tmp_path / "tokenizer.json"
    for pattern in ({"String": "a"}, {"Regex": "a"}):
        file.write_text(json.dumps({"normalizer": rules(9, pattern)}))
        with pytest.raises(SetupError, match="replaces a character by up to 1000000000"):
            check_folder(tmp_path)
        file.write_text(json.dumps({"normalizer": rules(1, pattern), "decoder": None}))
        check_folder(tmp_path)
    file.write_text(json.dumps({"normalizer": rules(9, {"String": "a" * 10})}))
    check_folder(tmp_path)
