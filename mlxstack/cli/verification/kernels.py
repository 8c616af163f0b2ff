"""`verify --kernels`: kernels of the device against float32 on a CPU."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime

from msgspec import Struct

from mlxstack.bench.environment import Conditions, conditions, ended
from mlxstack.cli.verification.probe import Say, chat_model
from mlxstack.engine.checks.kernels import KernelCheck, check_kernels
from mlxstack.engine.loading import loader
from mlxstack.host.hardware import this_memory
from mlxstack.host.home import Home
from mlxstack.planner.fit import refuse_if_too_big
from mlxstack.planner.memory_room import room_in


class KernelReport(Struct, frozen=True):
    """All checks, in their order."""

    preset: str
    conditions: Conditions
    seconds: float
    is_sound: bool
    checks: tuple[KernelCheck, ...]


def kernel_report(name: str, home: Home, env: Mapping[str, str], say: Say) -> KernelReport:
    """Check the kernels of a preset or a model. Raises SetupError."""
    budget = this_memory(env)
    candidate = chat_model(name, home, budget)
    refuse_if_too_big(candidate, room_in(home, budget))
    preset = candidate.preset
    about = conditions(preset.model.id, datetime.now(UTC).date(), env)
    began = time.monotonic()
    model = loader.load(preset.model, preset.kv).model
    checks = []
    for check in check_kernels(model):
        say(line_of(check))
        checks.append(check)
    return KernelReport(
        preset=preset.name,
        conditions=ended(about),
        seconds=time.monotonic() - began,
        is_sound=not any(check.is_fault for check in checks),
        checks=tuple(checks),
    )


def line_of(check: KernelCheck) -> str:
    """Verdict, kernel and difference of a check."""
    difference = f"{check.difference:.2g} of {check.tolerance:.2g} standard deviations"
    detail = ", ".join(filter(None, (difference if check.tolerance else "", check.detail)))
    return f"{check.outcome:11} {check.name} ({check.dtype}): {check.shape}: {detail}"
