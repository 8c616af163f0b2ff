"""First-time mistakes: each answers in one line with cause and remedy, and its exit code."""

import json
from pathlib import Path

import pytest

from tests.cli.test_words import run

NO_NETWORK = {"HF_ENDPOINT": "http://127.0.0.1:9"}

MISTAKES: list[tuple[str, int, tuple[str, ...]]] = [
    ("up qwen3-codr-30b-a3b", 5, ("no preset is called", "did you mean `qwen3-coder-30b-a3b`")),
    ("up mlx-community/Qwen3-0.6B-4bit", 5, ("cannot be reached", "check the network")),
    ("up ./nowhere", 5, ("there is no folder", "give a preset, a hub id or a model folder")),
    ("up ./nowhere.yaml", 5, ("there is no preset file",)),
    ("up {gguf}", 5, ("GGUF files, which llama.cpp reads", "get the MLX version")),
    ("up {empty}", 5, ("holds no config.json, so it is not a model folder",)),
    ("up {unheard}", 5, ("'qwen9_exp' are not in mlx-lm", "a newer mlx-lm may have the type")),
    ("up demo --ctx many", 2, ("`many` is not a number of tokens", "write it as 32768 or 32k")),
    ("up demo --kv-bits 5", 5, ("kv.bits is 5", "must be 4, 8 or 16")),
    ("up demo --set slots.count=0", 5, ("slots.count is `0`", "from 1 to 256")),
    ("up demo --set slots.cont=2", 5, ("no preset has the key", "did you mean `slots.count`")),
    ("up demo --set model.draft=x", 5, ("draft models are not served yet", "remove it")),
    ("up {wrong}", 5, ("wrong.yaml:2: slots.n_ctx is `lots`", "must be a whole number")),
    ("up {misspelt}", 5, ("misspelt.yaml:2: unknown key `slots.cont`", "did you mean `count`")),
    ("plan demo --memory lots", 2, ("is not an amount of memory", "write it as 24GB")),
    ("plan qwen9", 5, ("no preset is called `qwen9`",)),
    ("pull demo", 2, ("serves demo, which needs no download",)),
    ("pull org/model", 5, ("cannot be reached", "HF_ENDPOINT")),
    ("rm org/model --yes", 5, ("there is no model org/model on this machine",)),
    ("swap demo", 3, ("no service is running", "mlx-stack up demo")),
    ("restart demo", 3, ("no service `demo` was ever started here",)),
    ("presets show dmeo", 5, ("no preset is called `dmeo`", "did you mean `demo`")),
    ("presets new a/b --from demo", 5, ("cannot be the name of a preset",)),
    ("presets new mine --from ./nowhere", 5, ("there is no folder",)),
]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Folders and files that a newcomer may point at."""
    for name in ("gguf", "empty", "unheard"):
        (tmp_path / name).mkdir()
    (tmp_path / "gguf" / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    (tmp_path / "unheard" / "config.json").write_text(json.dumps({"model_type": "qwen9_exp"}))
    (tmp_path / "wrong.yaml").write_text("model: demo\nslots: {n_ctx: lots}\n")
    (tmp_path / "misspelt.yaml").write_text("model: demo\nslots: {cont: 2}\n")
    return {
        "gguf": str(tmp_path / "gguf"),
        "empty": str(tmp_path / "empty"),
        "unheard": str(tmp_path / "unheard"),
        "wrong": str(tmp_path / "wrong.yaml"),
        "misspelt": str(tmp_path / "misspelt.yaml"),
    }


@pytest.mark.parametrize(("typed", "code", "words"), MISTAKES, ids=[one[0] for one in MISTAKES])
def test_a_first_mistake_gets_one_line_with_cause_and_remedy(
    tmp_path: Path, places: dict[str, str], typed: str, code: int, words: tuple[str, ...]
) -> None:
    env = NO_NETWORK | {"HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path)}
    done = run(tmp_path / "home", *typed.format(**places).split(), **env)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_there_are_twenty_of_them() -> None:
    assert len({typed for typed, _, _ in MISTAKES}) >= 20
