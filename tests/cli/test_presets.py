"""A2, A8: what a preset is made of, its schema, and completion in a shell."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from mlxstack.config import modes, overrides, presets
from mlxstack.config.preset_reflection import json_schema, leaves
from mlxstack.config.presets import builtin_folder
from mlxstack.control.gateway import _with_shares
from mlxstack.core.preset import AUTO
from mlxstack.host.home import Home
from mlxstack.policy.memory.capacity import kv_budget, need
from tests.cli.test_messages import run
from tests.pages import more_shapes
from tests.pages.preset_page import files_of, smallest_mac

COMPLETE = "from mlxstack.cli.main import app; app(prog_name='mlx-stack')"


def completions(home: Path, text: str) -> list[str]:
    typed = f"mlx-stack {text}"
    done = subprocess.run(
        [sys.executable, "-c", COMPLETE],
        env={
            "MLX_STACK_HOME": str(home),
            "_MLX_STACK_COMPLETE": "complete_bash",
            "COMP_WORDS": typed,
            "COMP_CWORD": str(len(typed.split(" ")) - 1),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split()


def test_a2_show_tells_where_every_value_comes_from(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text(
        "extends: demo\nslots: {n_ctx: 2048}\n"
        "prefix_cache:\n  warm_prefixes:\n    - {name: head, text_file: head.txt}\n"
    )
    args = ("presets", "show", str(own), "--set", "kv.bits=16")
    text = run(tmp_path, *args, MLX_STACK_BATCH_MAX_SIZE="4").stdout
    lines = [line for line in text.splitlines()[1:] if not line.startswith(" ")]
    rows = {line.split()[0]: line.rstrip() for line in lines}
    assert set(rows) == {".".join(keys) for keys in leaves()}
    assert rows["slots.n_ctx"].endswith(f"{own}:2")
    assert rows["slots.count"].split()[1:] == ["3", f"{builtin_folder() / 'demo.yaml'}:7"]
    assert rows["kv.bits"].endswith("--set kv.bits")
    assert rows["batch.max_size"].endswith("MLX_STACK_BATCH_MAX_SIZE")
    assert rows["queue.max_waiting"].endswith("default")
    assert rows["prefix_cache.warm_prefixes"].endswith(f"{own}:4")
    told = json.loads(run(tmp_path, *args, "--json").stdout)
    assert told["origins"]["slots.n_ctx"] == f"{own}:2"


@pytest.mark.parametrize("file", sorted(builtin_folder().glob("*.yaml")), ids=lambda one: one.stem)
def test_a2_every_shipped_preset_obeys_the_schema(file: Path) -> None:
    jsonschema.Draft202012Validator(json_schema()).validate(yaml.safe_load(file.read_text()))


@pytest.mark.parametrize(
    "preset",
    [
        {"model": {"id": "demo"}, "slots": {"coutn": 3}},
        {"model": {"id": "demo"}, "slots": {"count": 0}},
        {"slots": {"count": 3}},
    ],
)
def test_a2_the_schema_refuses_what_the_reader_refuses(preset: dict[str, object]) -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    assert not validator.is_valid(preset)
    assert validator.is_valid({"extends": "demo", "model": {"alias": "x"}})


def test_a2_the_schema_can_be_printed(tmp_path: Path) -> None:
    printed = json.loads(run(tmp_path, "presets", "--schema").stdout)
    assert printed == json.loads(json.dumps(json_schema()))


def test_completion_knows_verbs_presets_and_clients(tmp_path: Path) -> None:
    assert completions(tmp_path, "unin") == ["uninstall"]
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "demo-of-mine.yaml").write_text("extends: demo\n")
    assert completions(tmp_path, "up demo") == ["demo", "demo-embedding", "demo-of-mine"]
    assert completions(tmp_path, "presets show gpt") == ["gpt-oss-120b", "gpt-oss-20b"]
    assert completions(tmp_path, "run co") == ["codex"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_shown_for_each_shell(tmp_path: Path, shell: str) -> None:
    # No shell runs the tests of a build server; Typer would look for one among the parents.
    unseen = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = run(tmp_path, "--show-completion", shell, **unseen)
    assert done.returncode == 0, done.stderr
    assert "complete" in done.stdout.lower()


SHIPPED = sorted(file.stem for file in builtin_folder().glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_all_slots_of_a_shipped_preset_can_be_full_on_the_smallest_mac(
    tmp_path: Path, name: str
) -> None:
    preset = presets.load(name, Home(tmp_path)).preset
    [found] = more_shapes.candidates([(preset, files_of(preset))])
    memory = smallest_mac(found)
    sum_of = need(found.load(memory))
    share = preset.prefix_cache.memory_budget_pct
    budget = kv_budget(memory.usable, sum_of.weights, sum_of.workspace)
    if share != AUTO:
        budget = min(budget, int(memory.total * share / 100))
    assert sum_of.kv_full + sum_of.kv_state <= budget


def test_the_members_of_the_coding_mode_can_all_be_full_on_one_mac(tmp_path: Path) -> None:
    members = [
        presets.load(one.preset, Home(tmp_path), map(overrides.from_option, one.options)).preset
        for one in modes.load("coding", Home(tmp_path)).members
    ]
    found = more_shapes.candidates([(preset, files_of(preset)) for preset in members])
    memory = smallest_mac(*found)
    sums = [need(one.load(memory)) for one in found]
    shares = _with_shares(list(zip(members, found, strict=True)), memory.usable, memory)
    taken = 0.0
    for (preset, n_bytes), one in zip(shares, sums, strict=True):
        share = preset.prefix_cache.memory_budget_pct
        assert share != AUTO, "the first member would take what the others need"
        assert one.kv_full + one.kv_state <= memory.total * share / 100
        taken += n_bytes
    assert taken <= memory.usable
