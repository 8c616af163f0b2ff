"""First-time mistakes: each answers in one line with cause and remedy, and its exit code."""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.main import get_command

from mlxstack import __version__
from mlxstack.cli.main import ELSEWHERE, app
from tests.cli.terminal import Shell, run

NO_SERVICE = "no service is running; start one with `mlx-stack up"

MISTAKES: list[tuple[str, int, tuple[str, ...]]] = [
    # Models and presets.
    ("up qwen3-codr-30b-a3b", 5, ("no preset is called", "did you mean `qwen3-coder-30b-a3b`")),
    ("up mlx-community/Qwen3-0.6B-4bit", 5, ("cannot be reached", "check the network")),
    ("up ./nowhere", 5, ("there is no folder", "give a preset, a hub id or a model folder")),
    ("up ./nowhere.yaml", 5, ("there is no preset file",)),
    ("up {gguf}", 5, ("GGUF files, which llama.cpp reads", "get the MLX version")),
    ("up {empty}", 5, ("holds no config.json, so it is not a model folder",)),
    (
        "up {unheard}",
        5,
        ("'qwen9_exp' are not in mlx-lm", ".[more-models]", "a newer release may have the type"),
    ),
    ("up qwen3.8-flash-next --port 0", 5, ("'qwen4_exp' are not in mlx-lm", ".[more-models]")),
    ("plan qwen3.8-flash-next --memory 192GB", 1, ("'qwen4_exp' are not in", ".[more-models]")),
    ("up demo --ctx many", 2, ("`many` is not a number of tokens", "write it as 32768 or 32k")),
    ("plan demo --ctx ²", 2, ("`²` is not a number of tokens",)),
    ("up demo --kv-bits 5", 5, ("kv.bits is `5`", "must be `4` or `8` or `16`")),
    ("up demo --set slots.count=0", 5, ("slots.count is `0`", "from 1 to 256")),
    ("up demo --set slots.cont=2", 5, ("no preset has the key", "did you mean `slots.count`")),
    (
        "up demo --set model.draft=x --set speculation=off",
        5,
        ("model.draft is x", "set speculation: auto"),
    ),
    ("up demo --draft x", 5, ("model.draft is `x`", "a hub id such as")),
    ("up {wrong}", 5, ("wrong.yaml:2: slots.n_ctx is `lots`", "must be a whole number")),
    ("up {misspelt}", 5, ("misspelt.yaml:2: unknown key `slots.cont`", "did you mean `count`")),
    ("plan demo --memory lots", 2, ("is not an amount of memory", "write it as 24GB")),
    ("up qwen3:0.6b", 5, ("Ollama's", "try `mlx-community/Qwen3-0.6B-4bit`")),
    ("up gemma3:270m", 5, ("Ollama's", "try `mlx-community/gemma-3-270m-it-4bit`")),
    ("up qwen3.5:9b", 5, ("Ollama's", "use the preset `qwen3.5-9b`")),
    ("up phi4:latest", 5, ("Ollama's", "https://huggingface.co/mlx-community")),
    ("up Qwen3-0.6B-4bit", 5, ("without its owner", "`mlx-community/Qwen3-0.6B-4bit`")),
    ("plan qwen9", 5, ("no preset is called `qwen9`",)),
    ("pull demo", 2, ("serves demo, which needs no download",)),
    ("pull org/model", 5, ("cannot be reached", "HF_ENDPOINT")),
    ("pull https://huggingface.co/org/model/tree/main", 5, ("org/model is not on this machine",)),
    ("up hf.co/org/model.git", 5, ("org/model is not on this machine",)),
    ("up https://huggingface.co/org", 5, ("no preset is called `https://huggingface.co/org`",)),
    ("rm org/model --yes", 5, ("there is no model org/model on this machine",)),
    ("swap demo", 3, ("no service is running", "mlx-stack up demo")),
    ("restart demo", 3, ("no service `demo` was ever started here",)),
    ("presets show dmeo", 5, ("no preset is called `dmeo`", "did you mean `demo`")),
    ("presets new a/b --from demo", 5, ("cannot be the name of a preset",)),
    ("presets new mine --from ./nowhere", 5, ("there is no folder",)),
    # Verbs of other tools.
    ("tags", 2, ("there is no `tags` here; use `mlx-stack",)),
    ("kill demo", 2, ("there is no `kill` here; use `mlx-stack down`",)),
    ("serve qwen3-coder-30b-a3b", 2, ("use `mlx-stack up qwen3-coder-30b-a3b`",)),
    ("serve", 2, ("use `mlx-stack up MODEL`",)),
    ("launch claude", 3, ("no service is running",)),
    ("up --slots 0 demo", 2, ("must be at least 1",)),
    (
        "up {gguf}/model.Q4_K_M.gguf",
        5,
        ("model.Q4_K_M.gguf is a GGUF file, which llama.cpp reads",),
    ),
    ("login", 2, ("use `hf auth login`",)),
    ("search qwen", 2, ("no `search` here; use https://huggingface.co/mlx-community, then",)),
    ("update", 2, ("no `update` here; use git pull in the clone", "docs/installation.md")),
    ("upgrade", 2, ("no `upgrade` here; use git pull in the clone", "docs/installation.md")),
    ("start demo", 2, ("use `mlx-stack up MODEL`",)),
    ("top", 2, ("use `mlx-stack tui`",)),
    ("generate hello", 2, ("use `mlx-stack chat`",)),
    ("bench serve", 2, ("`mlx-stack bench dev`",)),
    ("run qwen3.6-35b-a3b", 2, ("is a model", "`mlx-stack run claude --model qwen3.6-35b-a3b`")),
    ("run org/model", 2, ("is a model", "`mlx-stack chat org/model` talks to it")),
    # Typing errors.
    ("statsu", 2, ("No such command 'statsu'. Did you mean 'status'",)),
    ("up demo --prot 1", 2, ("No such option: --prot", "--port")),
    ("up demo --port 22x", 2, ("'--port': not a whole number; see `", "up --help`")),
    ("up", 2, ("give a preset, hub id or model folder, a mode with --mode",)),
    ("up --mode day --set slots.count=2", 2, ("--set goes with models", "the mode's file")),
    ("run cloude", 2, ("no client is called `cloude`; did you mean `claude`?",)),
    ("run cursor", 2, ("no client is called `cursor`; there is claude, codex, ",)),
    ("run claude --model demo --name x", 2, ("leave out `--name` and `--url`",)),
    ("logs demoo", 3, ("no service `demoo` was ever started here",)),
    ("env claude --url localhost:7109", 2, ("write it as http://127.0.0.1:7109",)),
    ("key --tier urgent", 2, ("there is no tier 'urgent'; known are high, normal, low",)),
    # Nothing runs.
    ("slots", 3, (NO_SERVICE,)),
    ("bench", 3, (NO_SERVICE,)),
    ("env claude", 3, (NO_SERVICE,)),
    ("agents show nobody", 3, (NO_SERVICE,)),
    ("chat --url http://127.0.0.1:1 -p hi", 3, ("no answer from http://127.0.0.1:1",)),
]
"""What is typed, the exit code, and parts of the answer."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> "dict[str, subprocess.CompletedProcess[str]]":
    """The answer to each mistake, on a machine without network."""
    folder = tmp_path_factory.mktemp("mistakes")
    places = {name: folder / name for name in ("gguf", "empty", "unheard")}
    for place in places.values():
        place.mkdir()
    (places["gguf"] / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    (places["unheard"] / "config.json").write_text(json.dumps({"model_type": "qwen9_exp"}))
    for name, slots in (("wrong", "{n_ctx: lots}"), ("misspelt", "{cont: 2}")):
        places[name] = folder / f"{name}.yaml"
        places[name].write_text(f"model: demo\nslots: {slots}\n")
    commands = [typed.format(**places).split() for typed, _, _ in MISTAKES]
    env = {
        "PATH": "/usr/bin:/bin",
        "COLUMNS": "200",
        "HOME": str(folder),
        "HF_HOME": str(folder / "hf"),
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "MLX_STACK_HOME": str(folder / "home"),
        "MLX_STACK_MEMORY": "64GB",
    }
    with ThreadPoolExecutor(3) as pool:
        ends = pool.map(lambda args: run(args, env), commands)
    return {typed: end for (typed, _, _), end in zip(MISTAKES, ends, strict=True)}


@pytest.mark.net
@pytest.mark.parametrize(("typed", "code", "expected"), MISTAKES, ids=[one[0] for one in MISTAKES])
def test_a_first_mistake_gets_one_line_with_cause_and_remedy(
    told: "dict[str, subprocess.CompletedProcess[str]]",
    typed: str,
    code: int,
    expected: tuple[str, ...],
) -> None:
    done = told[typed]
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    for word in expected:
        assert word in done.stderr


def test_words_of_similar_tools_do_what_they_say(tmp_path: Path) -> None:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "MLX_STACK_HOME": str(tmp_path)}
    versions = {run([word], env).stdout for word in ("version", "-V", "--version")}
    assert versions == {f"mlx-stack {__version__}\n"}
    assert run(["help", "up"], env).stdout == run(["up", "--help"], env).stdout
    assert run(["help"], env).stdout == run(["--help"], env).stdout


def test_there_are_twenty_of_them() -> None:
    assert len({typed for typed, _, _ in MISTAKES}) >= 20


def test_every_equivalent_of_a_foreign_verb_exists() -> None:
    verbs = get_command(app).commands  # type: ignore[attr-defined]
    for text in ELSEWHERE.values():
        args = text.split(",")[0].split()
        if args[0] == "mlx-stack" and not args[1].startswith("--"):
            assert args[1] in verbs, text


@pytest.mark.net
@pytest.mark.mlx
def test_mistakes_with_a_running_service(shell: Shell) -> None:
    del shell.env["MLX_STACK_WORKER"]
    assert shell.up().returncode == 0
    for args, answer in (
        (("slots", "save", "9", "x"), "error: Invalid slot ID 9: this service has slots 0 to 2\n"),
        (("agents", "show", "nobody"), "error: there is no agent nobody"),
    ):
        done = shell.run(*args)
        assert done.returncode == 1
        assert done.stderr.startswith(answer) and done.stderr.count("\n") == 1
    missing = shell.run("run", "pi", PATH="/nowhere")
    assert missing.returncode == 1
    assert "install it with `npm install -g @earendil-works/pi-coding-agent`" in missing.stderr
