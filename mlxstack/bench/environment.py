"""Conditions of a measurement: machine, versions, BLAS, load, power, heat."""

import os
from collections.abc import Mapping
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxstack import __version__
from mlxstack.core.formatting import size
from mlxstack.host.command_buffers import BufferLimit, buffer_limits
from mlxstack.host.hardware import CHILD_FAULTS, ask_mlx, for_mlx, program_file, this_hardware
from mlxstack.host.macos import gpu_name, system_version
from mlxstack.host.memory_pressure import sysctl
from mlxstack.host.power_state import PowerState, power_state

PACKAGES = ("mlx", "mlx-lm")
WIRED_LIMIT = b"iogpu.wired_limit_mb"
MAX_DEVICE_S = 60.0
DEVICE_PROGRAM = program_file("mlxstack.engine.device_facts")
"""By `-m` its package would import mlx-lm, and that transformers."""


class Conditions(Struct, frozen=True):
    """Machine and versions; `load` is the system's average of a minute before.

    `gpu` is empty where MLX computes on a CPU, `macos` elsewhere. `mlx_variables` are those of the
    measured process, `buffer_limits` two of them and their sources on a Mac. `wired_limit_mb` is 0
    where macOS decides, None elsewhere.
    """

    day: str
    machine: str
    versions: dict[str, str]
    model: str
    blas: str
    load: float
    macos: str = ""
    gpu: str = ""
    mlx_variables: dict[str, str] = {}
    buffer_limits: tuple[BufferLimit, ...] = ()
    wired_limit_mb: int | None = None
    before: PowerState | None = None
    after: PowerState | None = None


def child_env(env: Mapping[str, str]) -> dict[str, str]:
    """Environment of every measured process: OpenBLAS and huge pages."""
    return {**env, **for_mlx(env)}


def conditions(model: str, day: date, env: Mapping[str, str]) -> Conditions:
    """Describe this computer now; `ended` adds its state after the measurement."""
    hardware = this_hardware()
    total = size(hardware.total_bytes)
    system = system_version()
    return Conditions(
        day=day.isoformat(),
        machine=f"{hardware.chip}, {hardware.n_cores} cores, {total}, {hardware.system}",
        versions={"mlx-stack": __version__, **{name: metadata.version(name) for name in PACKAGES}},
        model=model,
        blas=_blas(child_env(env)),
        load=os.getloadavg()[0],
        macos=str(system) if system.version else "",
        gpu=gpu(env),
        mlx_variables=mlx_variables(child_env(env)),
        buffer_limits=buffer_limits(env),
        wired_limit_mb=sysctl(WIRED_LIMIT) if system.version else None,
        before=power_state(),
    )


def ended(conditions: Conditions) -> Conditions:
    """Conditions with the power, heat and memory pressure of now."""
    return replace(conditions, after=power_state())


def description(conditions: Conditions) -> list[str]:
    """Lines on machine, versions and day, with the details."""
    versions = ", ".join(f"{name} {version}" for name, version in conditions.versions.items())
    return [f"{conditions.machine}; {versions}; {conditions.day}", *details(conditions)]


def details(conditions: Conditions) -> list[str]:
    """Lines on system, GPU, variables and power; without those that are unknown."""
    lines = [part for part in (conditions.macos, conditions.gpu) if part]
    if conditions.wired_limit_mb is not None:
        limit = f"{conditions.wired_limit_mb} MiB" if conditions.wired_limit_mb else "not set"
        lines.append(f"iogpu.wired_limit_mb {limit}")
    variables = [f"{name}={value}" for name, value in sorted(conditions.mlx_variables.items())]
    remarks = ["; ".join(lines), " ".join(variables)]
    if conditions.buffer_limits:
        remarks.append(f"Command buffers: {', '.join(map(str, conditions.buffer_limits))}")
    for when, state in (("Before", conditions.before), ("After", conditions.after)):
        if state is not None:
            remarks.append(f"{when}: {state}")
    return [line for line in remarks if line]


def mlx_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that MLX itself reads."""
    names = (name for name in env if name.startswith("MLX_") and not name.startswith("MLX_STACK_"))
    return {name: env[name] for name in names}


def gpu(env: Mapping[str, str]) -> str:
    """GPU that MLX computes on, with architecture and cores; empty without one."""
    try:
        facts = ask_mlx(["-P", str(DEVICE_PROGRAM)], dict[str, Any], MAX_DEVICE_S, env=env)
    except CHILD_FAULTS:
        return ""
    if facts["kind"] != "gpu":
        return ""
    return gpu_name(facts)


def _blas(env: Mapping[str, str]) -> str:
    loaded = [name for name in env.get("LD_PRELOAD", "").split(":") if "openblas" in name]
    if loaded:
        return f"{Path(loaded[0]).name} preloaded for all"
    return "the BLAS that MLX brings"
