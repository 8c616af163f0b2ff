"""Presets derived from many models on disk: what is read, and how often."""

import os
from collections import Counter
from pathlib import Path

import pytest

from mlxstack.config import presets
from mlxstack.control.start import request_for
from mlxstack.host.home import Home
from mlxstack.policy.memory.capacity_advice import SlotSizes
from tests import models

N_MODELS = 4


def start(home: Home, folder: Path) -> str:
    """Start request of a model; writes its preset as `up` does. Returns the name."""
    request = request_for(str(folder), home, SlotSizes())
    assert request.file is not None
    request.file.path.parent.mkdir(parents=True, exist_ok=True)
    request.file.path.write_text(request.file.text)
    assert request.file.preset.base == ""
    return request.preset


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    sources = [tmp_path / f"m{n}" for n in range(N_MODELS)]
    for folder in sources:
        models.write(folder, models.LLAMA)
    return sources


def test_a_file_of_a_preset_is_read_once_for_all_models(
    tmp_path: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[Path] = Counter()
    real = presets.read_yaml

    def counting(path: Path) -> object:
        read[path] += 1
        return real(path)

    monkeypatch.setattr(presets, "read_yaml", counting)
    home = Home(tmp_path / "home")
    home.presets.mkdir(parents=True)
    own = home.presets / "own.yaml"
    own.write_text("model: somebody/else\n")
    names = [start(home, folder) for folder in (*folders, *folders)]
    assert names == [folder.name for folder in (*folders, *folders)]
    assert read[own] == 1
    # A preset that others extend is read with each of them.
    assert all(n <= 2 for n in read.values())


def test_a_preset_that_was_edited_is_read_again(tmp_path: Path, folders: list[Path]) -> None:
    home = Home(tmp_path / "home")
    folder = folders[0]
    start(home, folder)
    own = home.presets / "own.yaml"
    own.parent.mkdir(parents=True, exist_ok=True)
    own.write_text(f"model: {folder}\nslots: {{count: 3}}\n")
    request = request_for(str(folder), home, SlotSizes())
    assert request.file is not None
    assert request.file.preset.base == "own"
    own.write_text("model: somebody/else\n")
    os.utime(own, (1, 1))
    start(home, folder)


def test_names_of_derived_presets_are_known_without_a_list(
    tmp_path: Path, folders: list[Path]
) -> None:
    home = Home(tmp_path / "home")
    assert presets.file_of("m0", home) is None
    start(home, folders[0])
    assert presets.file_of("m0", home) == home.derived_presets / "m0.yaml"
    assert presets.file_of("../presets/demo", home) is None
    assert presets.file_of("x" * 5000, home) is None
    assert presets.file_of("a\0b", home) is None
    home.presets.mkdir(parents=True)
    (home.presets / "m0.yaml").write_text("model: demo\n")
    assert presets.file_of("m0", home) == home.presets / "m0.yaml"
