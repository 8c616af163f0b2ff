"""Code that comes with a model does not run, and nothing is unpickled."""

import json
import re
from pathlib import Path

import pytest

from mlxstack.core.errors import SetupError
from mlxstack.core.preset import KVSpec, ModelSpec
from mlxstack.engine.loading.loader import load
from mlxstack.engine.loading.tokenizer_folder import load_tokenizer
from tests.models import build

EVIL = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from mlx_lm.models.llama import Model, ModelArgs
"""
SOURCES = Path(__file__).parents[2] / "mlxstack"


def armed(folder: Path) -> Path:
    """A model whose configuration names Python code of its own."""
    build(folder, "tiny")
    (folder / "evil.py").write_text(EVIL)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "evil.py"}))
    return folder


@pytest.mark.mlx
def test_code_of_a_model_does_not_run_unless_the_preset_trusts_it(tmp_path: Path) -> None:
    folder = armed(tmp_path / "model")
    with pytest.raises(SetupError, match="trust_remote_code"):
        load(ModelSpec(id=str(folder)), KVSpec())
    assert not (folder / "ran").exists()
    load(ModelSpec(id=str(folder), trust_remote_code=True), KVSpec())
    assert (folder / "ran").exists(), "the trap works"


@pytest.mark.mlx
def test_code_of_a_tokenizer_runs_neither_by_a_preset_nor_by_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default transformers asks the terminal, and runs it where that answers `y`."""
    folder = build(tmp_path / "model", "tiny")
    (folder / "evil.py").write_text(EVIL + "class Evil: pass\n")
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
    }
    file.write_text(json.dumps(settings))
    asked: list[str] = []

    def answer(question: str = "") -> str:
        asked.append(question)
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    for work in (
        lambda: load_tokenizer(folder),
        lambda: load(ModelSpec(id=str(folder), trust_remote_code=True), KVSpec()),
    ):
        with pytest.raises(SetupError, match=r"is Python code of the folder .* does not run"):
            work()
    assert not asked and not (folder / "ran").exists()


def test_nothing_is_unpickled_evaluated_or_run_by_a_shell() -> None:
    banned = re.compile(r"\b(import (pickle|marshal|shelve)\b|eval\(|exec\(|shell=True|os\.system)")
    # From a parent to its child only.
    grammar = SOURCES / "features" / "formats" / "grammar"
    rendering = SOURCES / "text" / "rendering"
    images = SOURCES / "text" / "images"
    parents = {rendering / "renderers.py", grammar / "client_grammars.py", images / "bounds.py"}
    children = {rendering / "worker.py", grammar / "grammar_worker.py", images / "image_worker.py"}
    # Runs tests of `verify --tools --repairs` only, in a limited process.
    repairs = SOURCES / "cli" / "verification" / "tools" / "guarded_child.py"
    own = parents | children | {repairs}
    assert not any("pickle.loads" in parent.read_text() for parent in parents)
    for path in (file for file in SOURCES.rglob("*.py") if file not in own):
        found = banned.search(path.read_text().replace("mx.eval(", "").replace(".eval()", ""))
        assert found is None, f"{path}: {found}"
