"""Limits of command buffers for every process of MLX, on an imitated Mac; their memory in plans."""

import ctypes
import json
import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
from msgspec.structs import replace

from mlxstack.bench.environment import child_env, conditions, details
from mlxstack.cli.doctor import examine
from mlxstack.config import presets
from mlxstack.control import start
from mlxstack.core.preset import ModelSpec, Preset
from mlxstack.engine.device_memory import DeviceLimits, memory_plan
from mlxstack.engine.model.model_shape import shape_of_config
from mlxstack.host import command_buffers
from mlxstack.host.command_buffers import BufferLimit, LimitSource, buffer_limits, mac_limits
from mlxstack.host.hardware import ask_mlx, for_mlx, mac_memory, memory_limit, this_memory
from mlxstack.host.home import Home
from mlxstack.host.memory_pressure import sysctl_text
from mlxstack.planner.candidate import of_preset
from mlxstack.planner.memory_room import claim_of
from mlxstack.policy.memory.capacity import (
    MARGIN_BYTES,
    MAX_SCORE_BYTES,
    kv_budget,
    max_score_bytes,
    workspace_of,
)
from tests.api.running import running, tiny_preset
from tests.conftest import ModelOf
from tests.models import LLAMA
from tests.service.standin import FACTS

pytestmark = pytest.mark.mlx

GIB = 2**30
DEFAULTS = {"MLX_MAX_OPS_PER_BUFFER": "1000", "MLX_MAX_MB_PER_BUFFER": "400"}
WIDE = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 32,
}
SYSCTL = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.c_void_p,
    ctypes.c_size_t,
)
PRESET = Preset(model=ModelSpec(id="none"))
FIRST_IMPORT = """
import json, os, sys
from importlib.abc import MetaPathFinder
from types import SimpleNamespace
from mlxstack.host import command_buffers
command_buffers.platform = SimpleNamespace(system=lambda: "Darwin")
command_buffers.sysctl_text = lambda name: {chip!r}
class Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "mlx.core":
            limits = {{name: os.environ[name] for name in os.environ if "PER_BUFFER" in name}}
            print(json.dumps(limits), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
{program}
"""
VERIFY = """
from pathlib import Path
from mlxstack.cli.verification import identity, soak
from mlxstack.cli.verification.probe import EngineProbe
from mlxstack.core.preset import ModelSpec, Preset
EngineProbe(Preset(model=ModelSpec(id="none")), Path("."))
"""
PROGRAMS = {
    "verify": VERIFY,
    "rank": "import mlxstack.features.ranks.follower",
    "device": "import mlxstack.engine.device",
    "service": "from mlxstack.engine.chat_engine import ChatEngine",
}


def imitate_mac(
    monkeypatch: pytest.MonkeyPatch, chip: str = "Apple M1 Max", total: int = 64 * GIB
) -> None:
    """A Mac with this chip and memory, on which the user has set no variable."""
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(command_buffers, "sysctl_text", lambda _name: chip)
    installed = SimpleNamespace(total=total, available=total, percent=10.0)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: installed)
    for name in DEFAULTS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("chip", ["Apple M1", "Apple M2 Ultra", "Apple M4 Pro", "", "arm64"])
def test_a_mac_gets_both_limits(monkeypatch: pytest.MonkeyPatch, chip: str) -> None:
    imitate_mac(monkeypatch, chip)
    assert for_mlx({}) == DEFAULTS


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_mac(monkeypatch)
    env = {"MLX_MAX_MB_PER_BUFFER": "50"}
    assert for_mlx(env) == {"MLX_MAX_OPS_PER_BUFFER": "1000"}
    operations, numbers = buffer_limits(env)
    assert operations == BufferLimit("MLX_MAX_OPS_PER_BUFFER", "1000", LimitSource.HERE)
    assert str(numbers) == "MLX_MAX_MB_PER_BUFFER=50 (environment)"


@pytest.mark.parametrize("chip", ["Apple M5", "Apple M5 Max", "Apple M10"])
def test_an_m5_keeps_the_limits_of_mlx(monkeypatch: pytest.MonkeyPatch, chip: str) -> None:
    imitate_mac(monkeypatch, chip)
    assert for_mlx({}) == {}
    assert {limit.source for limit in buffer_limits({})} == {LimitSource.MLX}
    assert this_memory({}).buffered_bytes == 0


def test_the_smallest_macs_get_a_lower_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_mac(monkeypatch, total=16 * GIB)
    assert for_mlx({})["MLX_MAX_MB_PER_BUFFER"] == "100"
    # The cache of freed buffers, 4 % of the working set, gives way to what is kept.
    assert mac_memory("16GB").buffered_bytes == 0
    assert mac_memory("24GB").buffered_bytes == 800_000_000 - int(16 * GIB * 0.04)
    assert mac_memory("64GB").buffered_bytes == 0


@pytest.mark.skipif(sys.platform == "darwin", reason="about other systems")
def test_other_systems_are_left_alone() -> None:
    assert not DEFAULTS.keys() & for_mlx({}).keys()
    assert buffer_limits({}) == ()


def test_the_name_of_the_chip_is_read_without_a_child_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(name: bytes, value: Any, size: Any, _new: None, _n_new: int) -> int:
        text = b"Apple M5 Pro"
        if name != command_buffers.CHIP_NAME:
            return -1
        ctypes.memmove(value, text, len(text))
        return 0

    library = SimpleNamespace(sysctlbyname=SYSCTL(read))
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: library)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a child process"))
    assert sysctl_text(command_buffers.CHIP_NAME) == "Apple M5 Pro"
    assert sysctl_text(b"hw.nothing") == ""


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_the_limits_are_set_before_mlx_is_imported(program: str, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in DEFAULTS}
    for chip, expected in (("Apple M2", DEFAULTS), ("Apple M5", {})):
        text = FIRST_IMPORT.format(chip=chip, program=program)
        done = subprocess.run(
            [sys.executable, "-c", text], env=env, cwd=tmp_path, capture_output=True, check=True
        )
        assert json.loads(done.stdout) == expected


def test_workers_and_children_get_the_limits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    imitate_mac(monkeypatch)
    request = start.StartRequest("demo", (), tmp_path)
    spec = start.spec_of(request, presets.load("demo", Home(tmp_path)).preset, Home(tmp_path))
    assert spec.env.items() >= DEFAULTS.items()
    assert child_env({}).items() >= DEFAULTS.items()
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    assert ask_mlx(["-c", program], dict[str, str], 60).items() >= DEFAULTS.items()


def test_props_names_limits_and_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    preset = tiny_preset(tmp_path / "model")
    with running(preset, tmp_path / "home") as live, httpx.Client(base_url=live.url) as http:
        assert http.get("/props").json()["command_buffer_limits"] == []
        imitate_mac(monkeypatch)
        limits = http.get("/props").json()["command_buffer_limits"]
    operations, numbers = limits
    assert operations == {
        "variable": "MLX_MAX_OPS_PER_BUFFER", "value": "1000", "source": "mlx-stack",
    }  # fmt: skip
    assert numbers["value"] == "400"


def test_doctor_and_reports_name_limits_and_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    imitate_mac(monkeypatch)
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "200")
    expected = "MLX_MAX_OPS_PER_BUFFER=200 (environment), MLX_MAX_MB_PER_BUFFER=400 (mlx-stack)"
    report = details(conditions("demo", date(2026, 11, 28), os.environ))
    assert f"Command buffers: {expected}" in report
    checks = {check.subject: check.detail for check in examine(Home(tmp_path), os.environ)}
    assert checks["buffers"] == f"MLX's command buffers: {expected}"


def test_the_workspace_grows_by_what_long_buffers_keep() -> None:
    shape = shape_of_config(WIDE)
    preset = PRESET
    plain = workspace_of(shape, preset, 2, 48 * GIB)
    grown = workspace_of(shape, preset, 2, 48 * GIB, 2 * 400_000_000)
    assert grown == plain + 2 * 400_000_000
    assert workspace_of(shape, preset, 4, 0, 800_000_000) == workspace_of(shape, preset, 4)
    tiny = shape_of_config(LLAMA)
    growth = workspace_of(tiny, preset, 2, GIB, 800_000_000) - workspace_of(tiny, preset, 2, GIB)
    assert 0 < growth < 800_000_000, "a small model makes less than a command buffer may keep"


def test_plan_and_engine_of_a_mac_count_the_same(
    monkeypatch: pytest.MonkeyPatch, model_of: ModelOf
) -> None:
    imitate_mac(monkeypatch)
    monkeypatch.delenv("MLX_STACK_CPU", raising=False)
    folder = model_of("tiny")
    budget = this_memory({})
    assert (budget.working_set, budget.buffered_bytes) == (48 * GIB, 0)
    preset = Preset(model=ModelSpec(id=str(folder)), name="tiny")
    load = of_preset(preset).load(budget)
    facts = replace(FACTS, path=str(folder), n_bytes=load.weights)
    limits = DeviceLimits(2 * GIB, memory_limit(48 * GIB), 48 * GIB)
    plan = memory_plan(preset, facts, budget, limits)
    assert plan.kv_budget == kv_budget(budget.usable, load.weights, load.workspace)
    assert plan.array_limit == budget.usable - load.workspace
    assert claim_of(preset, budget, "").fixed == load.weights + load.workspace + MARGIN_BYTES


def test_scores_of_attention_may_take_a_share_of_the_working_set() -> None:
    alone = PRESET
    shared = replace(PRESET, hosts=("127.0.0.1", "10.0.0.2"))
    assert max_score_bytes(alone, 0) == MAX_SCORE_BYTES == max_score_bytes(shared, 48 * GIB)
    assert max_score_bytes(alone, 16 * GIB) == int(0.04 * 16 * GIB)
    assert max_score_bytes(alone, 400 * GIB) == 2 * GIB
    assert mac_limits("Apple M3", 96 * GIB) == DEFAULTS
