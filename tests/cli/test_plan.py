"""A13, A14, C15, F1, F7: planning from config.json alone, as a person types it."""

import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxstack.config.presets import builtin_folder
from mlxstack.core.errors import SetupError
from mlxstack.core.preset import ModelSpec, Preset, Speculation
from mlxstack.host.hardware import MemoryBudget, memory_limit
from mlxstack.host.home import Home
from mlxstack.policy.memory.capacity import MARGIN_BYTES, ShapeReply
from tests import models
from tests.cli.test_messages import run
from tests.conftest import ModelOf
from tests.patience import PATIENCE_S
from tests.repetition import in_soak

KIB = 2**10
MIB = 2**20
GIB = 2**30

SECTION_0 = {
    "gpt-oss-20b": (24 * KIB, 3 * MIB, 99 * MIB),
    "qwen3-coder-30b-a3b": (96 * KIB, 0, 384 * MIB),
    "gemma4-26b-a4b": (20 * KIB, 200 * MIB, 280 * MIB),
}
"""Growth per token, window constant, KV at 4,096 tokens: computed by hand from the geometries."""


def told(home: Path, *args: str, **env: str) -> Any:
    done = run(home, *args, "--json", **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("args", [("--table",), *in_soak((("--table", "--ctx", "4096"),))])
def test_a13_f7_the_table_of_the_published_geometries(
    tmp_path: Path, args: tuple[str, ...]
) -> None:
    rows = {one["preset"]: one for one in told(tmp_path, "plan", *args)["models"]}
    for name, (growth, window, total) in SECTION_0.items():
        row = rows[name]
        assert (row["growth_bytes"], row["window_bytes"]) == (growth, window)
        assert row["kv_bytes"]["4096"] == total
    text = run(tmp_path, "plan", *args).stdout
    line = next(line for line in text.splitlines() if line.startswith("gpt-oss-20b"))
    assert line.split()[-6:] == ["24", "KiB", "3", "MiB", "99", "MiB"]


def test_a13_a_preset_is_planned_without_its_model(tmp_path: Path) -> None:
    found = told(tmp_path, "plan", "gemma4-26b-a4b", "--memory", "48GB")
    assert found["spec"]["is_excerpt"]
    assert found["spec"]["weights_from"] == "estimated"
    assert found["memory"]["usable"] == memory_limit(36 * GIB)
    assert found["wanted"]["fits"]
    rows = {row["n_ctx"]: row for row in found["contexts"]}
    plain, dense, thin = rows[32768]["precisions"]
    assert plain["kv_bytes"] == 32768 * 20 * KIB + 200 * MIB
    assert dense["kv_bytes"] == 32768 * 10.625 * KIB + 200 * MIB
    assert [one["bits"] for one in (plain, dense, thin)] == [16, 8, 4]
    assert plain["n_agents"] < dense["n_agents"] < thin["n_agents"]
    cells = {(one["n_slots"], one["n_ctx"]): one["fits"] for one in found["matrix"]}
    for row in rows.values():
        n_agents = row["precisions"][0]["n_agents"]
        assert all(
            fits == (n <= n_agents) for (n, ctx), fits in cells.items() if ctx == row["n_ctx"]
        )


def test_the_share_of_memory_for_kv_is_counted_and_named(tmp_path: Path) -> None:
    args = ("plan", "qwen3-coder-30b-a3b", "--memory", "64GB", "--ctx", "64k", "--agents", "3")
    small = ("--set", "prefix_cache.memory_budget_pct=10")
    found = told(tmp_path, *args, *small)
    wanted = found["wanted"]
    assert not wanted["fits"]
    assert wanted["n_bytes"] < found["memory"]["usable"]
    assert found["kv_budget_bytes"] == int(64 * GIB / 10) < wanted["kv_bytes"]
    proposal = wanted["nearest"][0]
    assert proposal.startswith("--set prefix_cache.memory_budget_pct=")
    assert told(tmp_path, *args, *proposal.split())["wanted"]["fits"]
    text = run(tmp_path, *args, *small).stdout
    assert "prefix_cache.memory_budget_pct 10 gives KV 6.4 GiB (10 % of 64.0 GiB)" in text
    left = told(tmp_path, *args)
    assert left["wanted"]["fits"]
    assert left["kv_budget_bytes"] > left["wanted"]["kv_bytes"]
    taken = left["spec"]["weights_bytes"] + left["workspace_bytes"] + MARGIN_BYTES
    assert left["kv_budget_bytes"] == left["memory"]["usable"] - taken


def test_the_largest_mac_is_not_left_unused(tmp_path: Path) -> None:
    for memory, agents in (("128GB", "4"), ("192GB", "1")):
        args = ("plan", "--memory", memory, "--ctx", "48k", "--agents", agents)
        best = told(tmp_path, *args)["presets"][0]
        assert best["verdict"] == "fits"
        assert best["weights_bytes"] > int(memory.removesuffix("GB")) * GIB / 3


def test_a_bare_number_of_memory_means_gigabytes(tmp_path: Path) -> None:
    bare, spelled = (
        told(tmp_path, "plan", "gpt-oss-20b", "--memory", memory)["wanted"]
        for memory in ("32", "32GB")
    )
    assert bare == spelled
    assert bare["fits"]


def test_a13_what_does_not_fit_is_told_with_what_would(tmp_path: Path) -> None:
    args = ("plan", "qwen3-coder-30b-a3b", "--memory", "36GB", "--ctx", "32k", "--agents", "10")
    found = told(tmp_path, *args)["wanted"]
    assert not found["fits"]
    assert found["n_bytes"] > 45 * GIB
    changed = run(tmp_path, *args).stdout
    assert "does not fit into 25.9 GiB; what would fit: --set " in changed
    assert "--set slots.count=3" in changed


def test_an_embedding_model_is_planned_without_slots(tmp_path: Path) -> None:
    args = ("plan", "qwen3-embedding-0.6b", "--memory", "8GB")
    found = told(tmp_path, *args)
    assert (found["kind"], found["contexts"], found["matrix"]) == ("embedding", [], [])
    assert found["disk_bytes_50k"] == 0
    text = run(tmp_path, *args).stdout
    assert "texts of up to 8k tokens: " in text and ": fits; up to " in text
    assert "slot" not in text and "agent" not in text


def test_c15_disk_of_an_agent_of_50k_tokens_counts_the_window_once(tmp_path: Path) -> None:
    found = told(tmp_path, "plan", "gemma4-26b-a4b", "--memory", "64GB")
    assert found["disk_bytes_50k"] == pytest.approx(50_000 * 20 * KIB + 200 * MIB, rel=0.001)


@pytest.mark.mlx
def test_c15_the_forecast_is_within_two_percent_of_a_real_file(
    tmp_path: Path, model_of: ModelOf
) -> None:
    from mlxstack.core.commands import SaveSlot
    from mlxstack.planner.candidate import of_preset
    from mlxstack.policy.memory.capacity import disk_bytes
    from mlxstack.store.slot_files import SlotFileFolder
    from tests.engine.harness import preset_of, prompt, running

    preset = preset_of(model_of("tiny-swa"))
    with running(preset, tmp_path) as driver:
        driver.answer(prompt(900, seed=5), slot=0)
        saved = driver.engine.run_slot_command(SaveSlot(0, "agent.bin")).result(timeout=PATIENCE_S)
    (folder,) = {file.parent for file in tmp_path.rglob("agent.bin*")}
    manifest = SlotFileFolder(folder).read("agent.bin")
    files = [file for file in (tmp_path / "kv").rglob("*.safetensors") if file.is_file()]
    kept = {*manifest.segments, *manifest.checkpoints}
    real = sum(file.stat().st_size for file in files if file.stem in kept)
    geometry = of_preset(Preset(model=ModelSpec(id=preset.model.id))).geometry(half_bytes=4)
    assert disk_bytes(geometry, saved.n_saved, len(manifest.checkpoints)) == pytest.approx(
        real, rel=0.02
    )


@pytest.mark.parametrize(
    "args", [("--agents", "10", "--ctx", "32k"), *in_soak((("--agents", "10", "--ctx", "8192"),))]
)
def test_a14_models_are_ranked_for_a_load(tmp_path: Path, args: tuple[str, ...]) -> None:
    found = told(tmp_path, "plan", *args, "--memory", "48GB")
    ranked = found["presets"]
    assert len(ranked) >= 6
    verdicts = [one["verdict"] for one in ranked]
    assert verdicts == sorted(verdicts)
    assert all(one["n_bytes"] <= 36 * GIB for one in ranked if one["verdict"] == "fits")
    assert all(one["max_agents"] >= 10 for one in ranked if one["verdict"] == "fits")
    assert all(one["why"] for one in ranked)
    text = run(tmp_path, "plan", *args, "--memory", "48GB").stdout
    assert text.splitlines()[-1].startswith(f"mlx-stack up {ranked[0]['preset']} --slots 10")


def test_a14_nothing_is_recommended_when_nothing_fits(tmp_path: Path) -> None:
    done = run(tmp_path, "plan", "--agents", "10", "--memory", "2GB")
    assert done.returncode == 0
    assert "no preset fits" in done.stdout and "too large" not in done.stdout
    assert "mlx-stack up" not in done.stdout
    assert "too large" in run(tmp_path, "plan", "--all", "--memory", "2GB").stdout


def test_plan_ranks_the_presets_that_fit_for_agents_and_keeps_a_reserve(tmp_path: Path) -> None:
    found = told(tmp_path, "plan", "--memory", "64GB")
    assert (found["n_agents"], found["n_ctx"]) == (3, 64 * 1024)
    fitting = [one for one in found["presets"] if one["command"]]
    assert all(one["n_bytes"] <= found["memory"]["usable"] * 0.9 for one in fitting)
    text = run(tmp_path, "plan", "--memory", "64GB").stdout
    assert "3 agents x 64k tokens" in text and "10 % of it kept free" in text
    assert "gpt-oss-120b" not in text and "minimax-m2" not in text
    assert text.splitlines()[-1] == "mlx-stack up qwen3.6-35b-a3b"
    every = run(tmp_path, "plan", "--memory", "64GB", "--all").stdout
    assert "gpt-oss-120b" in every and "minimax-m2" in every
    assert every.splitlines()[-1] == text.splitlines()[-1]


def test_the_command_that_plan_prints_fits(tmp_path: Path) -> None:
    for memory in ("16GB", "24GB", "48GB"):
        *_, command = run(tmp_path, "plan", "--memory", memory).stdout.splitlines()
        _, _, preset, *options = command.split()
        names = {"--slots": "slots.count", "--ctx": "slots.n_ctx", "--kv-bits": "kv.bits"}
        sets = [
            f"--set={value}"
            if name == "--set"
            else f"--set={names[name]}={value.replace('64k', '65536')}"
            for name, value in zip(options[::2], options[1::2], strict=True)
        ]
        assert told(tmp_path, "plan", preset, "--memory", memory, *sets)["wanted"]["fits"], command


def test_a_preset_derived_from_a_served_model_is_not_ranked(
    tmp_path: Path, model_of: ModelOf
) -> None:
    derived = tmp_path / "derived"
    derived.mkdir()
    (derived / "served.yaml").write_text(f"name: served\nmodel: {{id: {model_of('tiny')}}}\n")
    assert "served" in run(tmp_path, "plan", "--table").stdout
    assert "served" not in run(tmp_path, "plan", "--all", "--memory", "64GB").stdout


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--table", "--memory", "24GB"), "--memory changes nothing"),
        (("--table", "--agents", "3"), "--agents changes nothing"),
        (("--table", "demo"), "leave out the model"),
        (("--table", "--all"), "--all changes nothing"),
        (("demo", "--all"), "--all changes nothing"),
        (("--set", "kv.bits=8"), "--set changes nothing"),
        (("--ctx", "8k", "--ctx", "32k"), "give --ctx once"),
        (("--simulate", "--agents", "6"), "see `mlx-stack bench dev simulate"),
        (("--scenario", "mine.yaml"), "see `mlx-stack bench dev simulate"),
        (("--speeds-of", "demo"), "see `mlx-stack bench dev simulate"),
        (("--recommend",), "is now `mlx-stack plan`"),
    ],
)
def test_an_option_that_would_change_nothing_is_refused(
    tmp_path: Path, args: tuple[str, ...], reason: str
) -> None:
    done = run(tmp_path, "plan", *args)
    assert done.returncode == 2 and reason in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout


def test_f1_spec_of_a_config_file_and_of_a_folder(tmp_path: Path, model_of: ModelOf) -> None:
    config = builtin_folder() / "configs" / "gemma4-26b-a4b.json"
    found = told(tmp_path, "spec", str(config))
    full = next(one for one in found["kinds"] if one["kind"] == "full")
    assert full["layers"] == [5, 11, 17, 23, 29]
    assert (full["heads"], full["k_dim"], full["token_bytes"]) == (2, 512, 4 * KIB)
    folder = told(tmp_path, "spec", str(model_of("tiny-swa")))
    assert folder["weights_from"] == "measured"
    assert [one["window"] for one in folder["kinds"]] == [64, 0]
    assert "sliding" not in run(tmp_path, "spec", str(model_of("tiny"))).stdout


@pytest.mark.parametrize(
    ("dtype", "memory", "bits", "is_widened"),
    [
        (mx.float32, (), 32, False),
        (mx.bfloat16, (), 32, True),
        (mx.bfloat16, ("--memory", "16GB"), 16, False),
    ],
    ids=["float32", "half on a CPU", "half on a Mac"],
)
def test_bits_and_bytes_are_those_of_the_memory_that_is_planned_for(
    tmp_path: Path, dtype: mx.Dtype, memory: tuple[str, ...], bits: int, is_widened: bool
) -> None:
    config = models.CONFIGS["tiny"] | {"dtype": str(dtype).removeprefix("mlx.core.")}
    folder = models.write(tmp_path / "model", config, dtype=dtype)
    args = ("plan", str(folder), "--ctx", "2k", "--ctx", "16k", *memory)
    done = run(tmp_path, *args, MLX_STACK_CPU="1")
    assert done.returncode == 0, done.stderr
    assert f"at {bits}-bit KV" in done.stdout and f"KV {bits} BIT" in done.stdout
    for name in ("weights", "KV"):
        line = next(line for line in done.stdout.splitlines() if line.startswith(f"{name} "))
        assert ("in memory" in line) == is_widened
    assert "16k*" in done.stdout and "2k*" not in done.stdout
    assert "longer than the 8k tokens of the model's training" in done.stdout


def test_f9_an_unknown_architecture_gets_no_number(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "mamba2", "num_hidden_layers": 4, "hidden_size": 8}')
    done = run(tmp_path, "spec", str(config))
    assert done.returncode == 1
    assert "mamba2" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.skipif(find_spec("mlx_vlm") is not None, reason="the extra more-models is there")
@pytest.mark.parametrize("command", [("plan",), ("presets",)])
def test_a_preset_that_needs_an_extra_is_named_with_its_command(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    done = run(tmp_path, *command)
    assert done.returncode == 0
    lines = (done.stdout + done.stderr).splitlines()
    (line,) = [line for line in lines if "more-models" in line]
    assert line.startswith("qwen3.8-flash-next: models of type 'qwen4_exp' are not in mlx-lm")
    assert "pip install '.[more-models]'" in line


def test_an_mlx_that_builds_no_model_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxstack.planner import candidate

    none = ShapeReply(refusal="MLX cannot build this model here: no GPU")
    monkeypatch.setattr(candidate, "shapes_of", lambda configs: [none for _ in configs])
    with pytest.raises(SetupError, match="no GPU; see `mlx-stack doctor`"):
        candidate.shipped(Home(tmp_path))


def test_a13_a_downloaded_model_is_preferred_to_the_excerpt(tmp_path: Path) -> None:
    cache = tmp_path / "hf" / "hub" / "models--mlx-community--gemma-4-26b-a4b-it-4bit"
    snapshot = cache / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(snapshot.name)
    config = builtin_folder() / "configs" / "gemma4-26b-a4b.json"
    (snapshot / "config.json").write_bytes(config.read_bytes())
    found = told(tmp_path, "spec", "gemma4-26b-a4b", HF_HOME=str(tmp_path / "hf"))
    assert found["config"] == str(snapshot / "config.json")
    assert not found["is_excerpt"]
    assert found["weights_from"] == "estimated"


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("--ctx", "many"), 2),
        (("--memory", "lots"), 2),
        (("--memory", "0"), 2),
        (("--memory", "-24"), 2),
        (("--memory", ""), 2),
        (("gemma9",), 5),
        (("demo-embedding", "--agents", "3"), 2),
    ],
)
def test_a_typo_is_one_sentence(tmp_path: Path, args: tuple[str, ...], code: int) -> None:
    done = run(tmp_path, "plan", *args)
    assert done.returncode == code
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_planning_needs_no_model_code(tmp_path: Path) -> None:
    import sys

    code = (
        "import sys; from mlxstack.cli.main import app\n"
        "try: app(['plan', 'gpt-oss-20b', '--memory', '32GB'])\n"
        "finally: print(' '.join(sorted(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"MLX_STACK_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    loaded = set(done.stderr.split())
    assert "mlxstack.planner.estimate" in loaded
    assert not loaded & {"mlx", "mlx.core", "mlx_lm", "litestar", "textual", "transformers"}


def test_a_draft_model_is_planned_with_its_weights_and_contexts(model_of: ModelOf) -> None:
    from mlxstack.planner.candidate import of_preset

    target, draft = (ModelSpec(id=str(model_of(kind))) for kind in ("tiny", "tiny-swa"))
    cpu = MemoryBudget(0, 0, 4, "a CPU")
    plain, beside = (of_preset(Preset(model=spec)).load(cpu) for spec in (target, draft))
    spec = ModelSpec(id=target.id, draft=draft.id)
    both = of_preset(Preset(model=spec, speculation=Speculation.AUTO)).load(cpu)
    assert both.weights == plain.weights + beside.weights
    assert both.draft == beside.geometry
    unknown = Preset(model=ModelSpec(id=target.id, draft="org/not-here"))
    assert of_preset(unknown).load(cpu) == plain


@pytest.mark.parametrize(
    ("preset", "memory"), [("qwen3-coder-30b-a3b", "24GB"), ("qwen3-coder-next", "48GB")]
)
def test_two_machines_hold_half_of_the_layers_each(
    tmp_path: Path, preset: str, memory: str
) -> None:
    """By heads and by layers: the second one has no `shard`."""
    args = ("plan", preset, "--ctx", "32k", "--agents", "3")
    alone = told(tmp_path, *args, "--memory", memory)
    pair = told(tmp_path, *args, "--hosts", f"2x{memory}")
    assert pair["spec"]["growth_bytes"] * 2 == alone["spec"]["growth_bytes"]
    assert not alone["wanted"]["fits"] and pair["wanted"]["fits"]


def test_machines_that_cannot_be_planned_are_refused(tmp_path: Path) -> None:
    gemma = run(tmp_path, "plan", "gemma4-26b-a4b", "--hosts", "2x24GB")
    assert gemma.returncode and "cannot divide" in gemma.stderr
    next_16 = run(tmp_path, "plan", "qwen3-coder-next", "--hosts", "16x24GB")
    assert next_16.returncode and "use fewer machines" in next_16.stderr
    for args in (("demo", "--hosts", "3"), ("demo", "--hosts", "1x24GB"), ("--hosts", "2x24GB")):
        assert "--hosts" in run(tmp_path, "plan", *args).stderr
