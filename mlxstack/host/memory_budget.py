"""Memory budget for models on this machine or an imagined one."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

import psutil
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.errors import SetupError

VARIABLE = "MLX_STACK_MEMORY"
CPU_VARIABLE = "MLX_STACK_CPU"
AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?)?", re.IGNORECASE)
POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
LEAST_BYTES, MOST_BYTES = 2**20, 2**50
"""Plausible bounds of a memory amount; beyond is a typo."""
CUDA_PACKAGES = ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")

LARGE_MAC_BYTES = 36 * 2**30
SMALL_MAC_SHARE, LARGE_MAC_SHARE = 2 / 3, 3 / 4
"""GPU share of memory on macOS, below and from 36 GiB."""

BUFFER_CACHE_SHARE, MAX_BUFFER_CACHE_BYTES = 0.04, 2 * 2**30
"""Limit of freed GPU buffers: share of the working set, bytes."""

LINUX_SHARE = 0.9
"""The rest is for the system and for what else runs."""


class MemoryBudget(Struct, frozen=True):
    """Bytes for models: `usable` of `total`; `half_bytes` is the size that numbers
    of half precision have there (4 where MLX computes on a CPU, which widens them)."""

    total: int
    usable: int
    half_bytes: int
    owner: str


def this_memory(env: Mapping[str, str]) -> MemoryBudget:
    """Budget of this computer; `MLX_STACK_MEMORY=24GB` overrides its total. Raises SetupError."""
    given = env.get(VARIABLE)
    if given:
        return replace(memory_of(bytes_of(given)), owner=f"this machine ({VARIABLE}={given})")
    memory = memory_of(psutil.virtual_memory().total)
    is_metal = sys.platform == "darwin" and memory.half_bytes == 2
    wired = _wired_limit() if is_metal else 0
    return replace(memory, usable=memory_limit(wired)) if wired else memory


def memory_of(total: int) -> MemoryBudget:
    """Budget of this computer, if it had `total` bytes."""
    half_bytes = 4 if _computes_on_cpu() else 2
    is_metal = sys.platform == "darwin" and half_bytes == 2
    usable = memory_limit(mac_share(total)) if is_metal else int(total * LINUX_SHARE)
    return MemoryBudget(total, usable, half_bytes, "this machine")


def mac_memory(text: str) -> MemoryBudget:
    """Budget of a Mac with `text` memory, e.g. 24GB. Raises SetupError."""
    total = bytes_of(text)
    unit = "" if text.strip()[-1:].isalpha() else " GB"
    usable = memory_limit(mac_share(total))
    return MemoryBudget(total, usable, 2, f"a Mac with {text.strip()}{unit}")


def mac_share(total: int) -> int:
    """Bytes of `total` for a Mac's GPU, by default or sysctl."""
    share = LARGE_MAC_SHARE if total >= LARGE_MAC_BYTES else SMALL_MAC_SHARE
    return int(total * share)


def buffer_cache_limit(working_set: int) -> int:
    """Bytes of freed buffers for MLX under this working set."""
    return min(MAX_BUFFER_CACHE_BYTES, int(working_set * BUFFER_CACHE_SHARE))


def memory_limit(working_set: int) -> int:
    """Bytes of this working set for models, beside freed buffers."""
    return working_set - buffer_cache_limit(working_set)


def bytes_of(text: str) -> int:
    """Bytes of `24`, `24GB`, `24 GiB`, `24g` or `24576M`, all equal.

    Raises SetupError for nonsense, and for less than a MiB or more than 1,024 TiB.
    """
    found = AMOUNT.fullmatch(text.strip())
    amount = float(found[1]) * 1024 ** POWERS[(found[2] or "G").upper()] if found else 0
    if not LEAST_BYTES <= amount <= MOST_BYTES:
        raise SetupError(
            f"`{text}` is not an amount of memory; write it as 24GB or 512MB (a bare number means "
            "GB)"
        )
    return int(amount)


def _wired_limit() -> int:
    """Bytes set by `sysctl iogpu.wired_limit_mb`; 0 if unset."""
    command = ["/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"]
    # Without close_fds CPython spawns instead of forking a process that maps a model.
    done = subprocess.run(command, capture_output=True, text=True, check=False, close_fds=False)
    output = done.stdout.strip()
    return int(output) * 2**20 if output.isdigit() else 0


def _computes_on_cpu() -> bool:
    if os.environ.get(CPU_VARIABLE):
        return True
    return sys.platform != "darwin" and not any(_is_installed(one) for one in CUDA_PACKAGES)


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
