"""A model folder of a stranger is tried in processes with limits of time and memory."""

import json
import shutil
from pathlib import Path

import pytest

from mlxstack.core.errors import SetupError
from mlxstack.demo import MODEL_DIR
from mlxstack.engine import template_check
from mlxstack.engine.loading.tokenizer_folder import load_tokenizer
from mlxstack.engine.template_check import check_template
from mlxstack.planner import model_shapes
from mlxstack.planner.model_shapes import shapes_of
from tests.models import LLAMA

pytestmark = [pytest.mark.mlx, pytest.mark.net]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    shutil.copytree(MODEL_DIR, made, ignore=shutil.ignore_patterns("*.safetensors"))
    return made


def test_a_tokenizer_that_grows_is_ended_by_its_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_check, "MAX_BYTES", 1024**3)
    file = folder / "tokenizer.json"
    rules = json.loads(file.read_text())
    growth = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    rules["normalizer"] = {"type": "Sequence", "normalizers": [growth] * 11}
    file.write_text(json.dumps(rules))
    with pytest.raises(SetupError, match=r"the tokenizer of the model at .* GB of memory"):
        check_template(folder)
    with pytest.raises(SetupError, match="replaces a character by up to"):
        load_tokenizer(folder)


def test_a_template_that_takes_all_memory_is_refused(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ ('x' * 20000000000)|length }}")
    with pytest.raises(SetupError, match=r"the chat template of .* takes more than 1 GB"):
        check_template(folder)


def test_a_sound_folder_is_taken(folder: Path) -> None:
    check_template(folder)


def test_building_a_shape_ends_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_shapes, "LIMIT_S", 1.0)
    (reply,) = shapes_of([LLAMA | {"num_hidden_layers": 10**8}])
    assert reply.shape is None and "SIGXCPU" in reply.refusal


def test_building_a_shape_ends_within_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_shapes, "MAX_BYTES", 2**27)
    (reply,) = shapes_of([LLAMA | {"num_hidden_layers": 10**8}])
    assert reply.shape is None and "MemoryError" in reply.refusal
