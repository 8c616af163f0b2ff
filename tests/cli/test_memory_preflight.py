"""A5, A6: what cannot fit is refused before anything is loaded, with the sum and the way out."""

import json
import re

import pytest

from tests.cli.terminal import Shell

pytestmark = pytest.mark.net


def memory_for(shell: Shell, share: float) -> str:
    """A total of which the tests' preset needs `share` of what is usable."""
    found = json.loads(shell.run("plan", str(shell.preset), "--json").stdout)
    usable = found["memory"]["usable"] / found["memory"]["total"]
    return f"{int(found['wanted']['n_bytes'] / share / usable) // 1024}K"


def test_a6_too_little_memory_is_refused_with_the_breakdown(shell: Shell) -> None:
    up = shell.run("up", "gemma4-26b-a4b", "--port", "0", MLX_STACK_MEMORY="1GiB")
    assert up.returncode == 5
    for word in ("weights", "KV full", "KV windows", "workspace", "estimated", "of 1.0 GiB"):
        assert word in up.stderr
    assert "no setting makes it fit" in up.stderr and "--set" not in up.stderr
    assert "no preset with 64k of context fits here; all: `mlx-stack plan --all`" in up.stderr
    assert "Traceback" not in up.stderr
    assert not (shell.home / "logs" / "gemma4-26b-a4b.log").exists()


def test_a_preset_that_does_not_fit_is_refused_with_settings_and_presets_that_do(
    shell: Shell,
) -> None:
    """The settings of one change alone do not fit here, nor does a context below 16k help."""
    memory = {"MLX_STACK_MEMORY": "26GB"}
    up = shell.run("up", "qwen3.6-35b-a3b", "--port", "0", **memory)
    assert up.returncode == 5
    *_, helps, others = up.stderr.splitlines()
    assert "slots.count=" in helps and "kv.bits=" in helps and "n_ctx" not in helps
    sets = helps.removeprefix("what would help: ").split(", or ")[0].split()
    planned = shell.run("plan", "qwen3.6-35b-a3b", *sets, "--json", **memory)
    assert json.loads(planned.stdout)["wanted"]["fits"]
    assert others.startswith("presets that fit here: ")
    assert others.endswith("; all: `mlx-stack plan`")
    assert "qwen3.5-9b (3 x 64k" in others


def test_a_stop_that_would_not_help_is_not_proposed(shell: Shell) -> None:
    assert shell.up().returncode == 0
    up = shell.run("up", "qwen3.6-35b-a3b", "--port", "0", MLX_STACK_MEMORY="16GB")
    assert up.returncode == 5
    assert "runs beside it" in up.stderr and "mlx-stack down" not in up.stderr


def test_a6_what_is_proposed_is_accepted(shell: Shell) -> None:
    memory = memory_for(shell, 1.02)
    up = shell.up(MLX_STACK_MEMORY=memory)
    assert up.returncode == 5
    proposals = re.findall(r"--set slots\.\w+=\d+", up.stderr)
    assert proposals
    for one in proposals:
        assert shell.up(*one.split(), "--dry-run").returncode == 0
        started = shell.up(*one.split(), MLX_STACK_MEMORY=memory)
        assert started.returncode == 0, started.stderr
        assert shell.run("down").returncode == 0


def test_a_share_of_memory_too_small_for_the_slots_is_refused_with_the_key(shell: Shell) -> None:
    small = ("--set", "prefix_cache.memory_budget_pct=1")
    memory = {"MLX_STACK_MEMORY": "300MB"}
    up = shell.up(*small, **memory)
    assert up.returncode == 5
    assert "prefix_cache.memory_budget_pct 1 gives KV 3 MiB (1 % of 300 MiB)" in up.stderr
    raised = re.search(r"prefix_cache\.memory_budget_pct=(\d+)", up.stderr)
    assert raised is not None
    started = shell.up("--set", raised[0], **memory)
    assert started.returncode == 0, started.stderr


def test_a6_services_that_run_beside_it_are_counted(shell: Shell) -> None:
    memory = memory_for(shell, 0.6)
    assert shell.up(MLX_STACK_MEMORY=memory).returncode == 0
    args = ("--set", "name=other", "--port", "0")
    second = shell.up(*args, MLX_STACK_MEMORY=memory)
    assert second.returncode == 5
    assert "`tiny`" in second.stderr
    assert "runs beside it" in second.stderr
    assert "mlx-stack down tiny" in second.stderr
    assert shell.run("down", "tiny").returncode == 0
    alone = shell.up(*args, MLX_STACK_MEMORY=memory)
    assert alone.returncode == 0, alone.stderr


def test_a6_a_restart_that_would_not_fit_leaves_the_service_running(shell: Shell) -> None:
    assert shell.up().returncode == 0
    assert shell.run("restart", MLX_STACK_MEMORY="16MB").returncode == 5
    assert shell.services()["tiny"]["state"] == "healthy"
    assert shell.run("restart").returncode == 0


def test_a6_a_model_that_nobody_knows_is_left_to_the_worker(shell: Shell) -> None:
    up = shell.up("--set", "model.id=nobody/nothing")
    assert up.returncode == 0
    assert "warning: whether `tiny` fits into memory is not checked" in up.stderr


def test_a5_keys_of_other_servers_are_refused_with_the_reason(shell: Shell) -> None:
    up = shell.up("--set", "kv.swa_full=true")
    assert up.returncode == 5
    assert "unknown key `kv.swa_full`: sliding windows are always capped" in up.stderr
    assert "remove it" in up.stderr and up.stderr.count("\n") == 1


def test_kv_that_cannot_be_quantized_is_refused_before_the_start(shell: Shell) -> None:
    up = shell.up("--set", "kv.bits=8")
    assert up.returncode == 5
    assert "kv.group_size: KV heads of 40 numbers cannot be quantized" in up.stderr


@pytest.mark.mlx
def test_a6_a_swap_counts_what_a_start_counts(shell: Shell) -> None:
    memory = memory_for(shell, 0.6)
    del shell.env["MLX_STACK_WORKER"]
    following = shell.folder / "next.yaml"
    following.write_text("extends: demo\nslots: {count: 3, n_ctx: 1024}\n")
    assert shell.up(MLX_STACK_MEMORY=memory).returncode == 0
    prepare = ("swap", str(following), "--prepare", "--name", "tiny")
    alone = shell.run(*prepare)
    assert alone.returncode == 0, alone.stderr
    assert shell.up("--set", "name=other", "--port", "0").returncode == 0
    beside = shell.run(*prepare)
    assert beside.returncode == 1
    for word in ("`next` does not fit", "workspace", "runs beside it", "mlx-stack down other"):
        assert word in beside.stderr
    assert "`tiny`" not in beside.stderr and "--set" not in beside.stderr
