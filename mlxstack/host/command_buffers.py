"""Limits of MLX's command buffers on Metal.

By default MLX commits a buffer after 40 or 50 operations, or once its inputs have 40 or 50 million
numbers ("MB" in the variable's name), and it waits while ten are in flight. Weights count, and one
matrix of experts has 42 million, so that a decode step is cut into 60 to 80 buffers and the CPU
prepares hardly a fifth of a step ahead. With higher limits a step of Qwen3.6 35B A3B took 10.9 ms
instead of 17.2 on an M1 Ultra (https://github.com/vllm-project/vllm-metal/pull/637); an M5 gains
nothing (https://github.com/lablup/mlxcel/pull/358). MLX reads both when it first uses the
device.
"""

import platform
import re
from collections.abc import Mapping
from enum import StrEnum

import psutil
from msgspec import Struct

from mlxstack.host.memory_pressure import sysctl_text

MAX_OPERATIONS = "MLX_MAX_OPS_PER_BUFFER"
MAX_NUMBERS = "MLX_MAX_MB_PER_BUFFER"
VARIABLES = (MAX_OPERATIONS, MAX_NUMBERS)

OPERATIONS = 1000
MILLIONS = 400
MILLIONS_OF_SMALL_MAC = 100
"""Million numbers of all inputs; those of freed arrays stay in memory until a buffer has ended."""
SMALL_MAC_BYTES = 20 * 2**30

UNCHANGED_FROM = 5
"""First generation of chips (M5) whose GPU keeps MLX's own limits."""
CHIP = re.compile(r"Apple M(\d+)")
CHIP_NAME = b"machdep.cpu.brand_string"

HALF_BYTES = 2


class LimitSource(StrEnum):
    """Where a limit comes from."""

    HERE = "mlx-stack"
    USER = "environment"
    MLX = "MLX"


class BufferLimit(Struct, frozen=True):
    """Value of a variable of MLX; empty where MLX decides."""

    variable: str
    value: str
    source: LimitSource

    def __str__(self) -> str:
        text = f"{self.variable} unset"
        if self.value:
            text = f"{self.variable}={self.value}"
        return f"{text} ({self.source})"


def mac_limits(chip: str, total_bytes: int) -> dict[str, str]:
    """Variables for a Mac; empty where MLX's own limits stay."""
    generation = CHIP.match(chip)
    if generation is not None and int(generation[1]) >= UNCHANGED_FROM:
        return {}
    millions = MILLIONS_OF_SMALL_MAC
    if total_bytes >= SMALL_MAC_BYTES:
        millions = MILLIONS
    return {MAX_OPERATIONS: str(OPERATIONS), MAX_NUMBERS: str(millions)}


def buffer_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process of MLX on this computer; empty if set."""
    return {name: value for name, value in _defaults().items() if name not in env}


def buffer_limits(env: Mapping[str, str]) -> tuple[BufferLimit, ...]:
    """Limits of a process of MLX on this Mac; empty elsewhere."""
    if platform.system() != "Darwin":
        return ()
    defaults = _defaults()
    return tuple(_limit(name, env.get(name), defaults.get(name)) for name in VARIABLES)


def buffered_bytes(variables: Mapping[str, str]) -> int:
    """Most bytes of freed arrays that a command buffer keeps.

    They are of half precision. 0 where MLX decides: a workspace holds the arrays of few kernels.
    """
    millions = variables.get(MAX_NUMBERS, "")
    if millions.isdigit():
        return HALF_BYTES * 10**6 * int(millions)
    return 0


def _limit(name: str, value: str | None, default: str | None) -> BufferLimit:
    if value is not None and value != default:
        return BufferLimit(name, value, LimitSource.USER)
    return BufferLimit(name, default or "", LimitSource.HERE if default else LimitSource.MLX)


def _defaults() -> dict[str, str]:
    if platform.system() != "Darwin":
        return {}
    return mac_limits(sysctl_text(CHIP_NAME), psutil.virtual_memory().total)
