"""A text model needs no Pillow, and without it a vision model is a text model."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import mlxstack.features.vision.images
import mlxstack.text.images
from tests import vision_models

HIDDEN = """
import sys
from importlib.abc import MetaPathFinder

class Hidden(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "PIL":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "PIL" else find_spec(name, *more)
"""
ANSWER = """
from pathlib import Path
from mlxstack.core.preset import KVSpec, ModelSpec
from mlxstack.engine.loading.loader import load
from mlxstack.features.vision.towers.encoder import with_images
from mlxstack.models.model_files import why_text_only
loaded = with_images(load(ModelSpec(id=sys.argv[1]), KVSpec()), KVSpec())
facts = loaded.facts
print(type(loaded.inputs).__name__, facts.accepts_images, why_text_only(Path(facts.path)))
print("PIL" in sys.modules)
"""


def printed(code: str, *args: str) -> list[str]:
    """Lines that a process of its own prints."""
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_nothing_of_ours_loads_pillow_or_numpy() -> None:
    """With Pillow installed too: transformers, which mlx-lm brings, loads it then."""
    modules = [
        f"{package.__name__}.{module.name}"
        for package in (mlxstack.text.images, mlxstack.features.vision.images)
        for module in pkgutil.iter_modules(package.__path__)
    ]
    assert len(modules) > 10
    found = "print(sorted({'PIL', 'numpy'} & set(sys.modules)))"
    assert printed(f"import sys, {', '.join(modules)}; {found}") == ["[]"]


@pytest.mark.mlx
def test_without_pillow_a_model_is_loaded_as_a_text_model(tmp_path: Path) -> None:
    folder = vision_models.build(tmp_path / "model", "qwen3_vl")
    assert printed(HIDDEN + ANSWER, str(folder)) == [
        "PlainTokens False Pillow is not installed; it comes with the extra [vision]",
        "False",
    ]
