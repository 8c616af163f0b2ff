"""Hardware of this machine: chip, cores, memory for models; environment of MLX."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.errors import SetupError
from mlxstack.host.command_buffers import CHIP_NAME, buffer_variables, buffered_bytes, mac_limits
from mlxstack.host.memory_pressure import sysctl_text

T = TypeVar("T")

CHILD_FAULTS = (OSError, subprocess.SubprocessError, msgspec.MsgspecError)

OPENBLAS = "libopenblas.so.0"
TUNABLES = ("glibc.malloc.hugetlb=1", "glibc.malloc.arena_max=2")
ARENAS = "MALLOC_ARENA_MAX"
SLEEP_AFTER = "OPENBLAS_THREAD_TIMEOUT"
SLEEP_AFTER_CYCLES = "12"
"""Exponent of 2. OpenBLAS waits for 2**26 processor cycles by default."""
LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/opt/OpenBLAS/lib")
THREADED_FOLDERS = ("openblas-pthread", "openblas-openmp", "openblas-serial")

MEMORY_VARIABLE = "MLX_STACK_MEMORY"
CPU_VARIABLE = "MLX_STACK_CPU"
AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?)?", re.IGNORECASE)
MODEL_NAME = re.compile(r"^model name[ \t]*:[ \t]*(\S.*)$", re.MULTILINE)
POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
MIN_BYTES = 2**20
MAX_BYTES = 2**50
"""Plausible bounds of a memory amount; beyond is a typo."""
CUDA_PACKAGES = ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")

LARGE_MAC_BYTES = 36 * 2**30
SMALL_MAC_SHARE = 2 / 3
LARGE_MAC_SHARE = 3 / 4
"""GPU share of memory on macOS, below and from 36 GiB."""

BUFFER_CACHE_SHARE = 0.04
MAX_BUFFER_CACHE_BYTES = 2 * 2**30
"""Limit of freed GPU buffers: share of the working set, bytes."""
FILLED_SHARE = 0.94
MIN_WORKSPACE_BYTES = 2**30
"""Share of the working set for arrays that stay, and what only a prefill takes beside them."""

LINUX_SHARE = 0.9
"""The rest is for the system and for what else runs."""


class Hardware(Struct, frozen=True):
    """Hardware: `chip` by its vendor's name, memory in bytes, usable cores."""

    system: str
    chip: str
    n_cores: int
    total_bytes: int
    available_bytes: int


def this_hardware() -> Hardware:
    """Machine that this process runs on."""
    memory = psutil.virtual_memory()
    return Hardware(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        chip=chip(),
        n_cores=psutil.cpu_count() or 1,
        total_bytes=memory.total,
        available_bytes=memory.available,
    )


def chip(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Chip name, such as `Apple M3 Max`, else the architecture."""
    if platform.system() == "Darwin":
        return sysctl_text(CHIP_NAME) or platform.machine()
    text = ""
    if cpuinfo.is_file():
        text = cpuinfo.read_text(errors="replace")
    match = MODEL_NAME.search(text)
    if match:
        return match[1].strip()
    return platform.machine()


def version_of(package: str) -> str | None:
    """Version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def find_openblas(folders: tuple[str, ...] = LIBRARY_FOLDERS) -> Path | None:
    """OpenBLAS to preload on Linux, preferably threaded; else None.

    MLX's CPU wheel links the slow reference BLAS; preloading this one is all that it takes.
    """
    if platform.system() != "Linux":
        return None
    places = (
        Path(folder) / place / build / OPENBLAS
        for folder in folders
        for place in (f"{platform.machine()}-linux-gnu", ".")
        for build in (*THREADED_FOLDERS, ".")
    )
    return next(filter(Path.is_file, places), None)


def preload(env: Mapping[str, str], library: Path | None) -> dict[str, str]:
    """Variables for a child's `env` to preload `library`; empty if set."""
    already = env.get("LD_PRELOAD", "")
    if library is None or "openblas" in already:
        return {}
    return {"LD_PRELOAD": f"{library}:{already}" if already else str(library)}


def blas_sleep(env: Mapping[str, str], system: str) -> dict[str, str]:
    """Variables that let idle threads of OpenBLAS sleep; empty if set.

    By default they wait actively between two products, on cores that the event loop needs.
    https://github.com/OpenMathLib/OpenBLAS/blob/develop/USAGE.md
    """
    if system != "Linux" or SLEEP_AFTER in env:
        return {}
    return {SLEEP_AFTER: SLEEP_AFTER_CYCLES}


def malloc_tunables(env: Mapping[str, str], system: str) -> dict[str, str]:
    """Variables for glibc's malloc: huge pages, few arenas; else empty.

    MLX on a CPU takes its arrays from malloc, and touching fresh pages of 4 KiB costs more than
    filling them does. Each arena keeps what threads have freed, so that a burst of requests
    leaves the more behind the more arenas there are. What the user has set stays.
    https://sourceware.org/glibc/manual/latest/html_node/Memory-Allocation-Tunables.html
    """
    if system != "Linux":
        return {}
    before = env.get("GLIBC_TUNABLES", "")
    set_by_user = {tunable.partition("=")[0] for tunable in before.split(":")}
    if ARENAS in env:
        set_by_user.add("glibc.malloc.arena_max")
    added = [tunable for tunable in TUNABLES if tunable.partition("=")[0] not in set_by_user]
    if added:
        return {"GLIBC_TUNABLES": ":".join([before, *added] if before else added)}
    return {}


def for_mlx(env: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process that computes with MLX here."""
    system = platform.system()
    return (
        preload(env, find_openblas())
        | blas_sleep(env, system)
        | malloc_tunables(env, system)
        | buffer_variables(env)
    )


def ask_mlx(
    arguments: Sequence[str],
    kind: type[T],
    timeout_s: float,
    question: object = None,
    env: Mapping[str, str] = os.environ,
) -> T:
    """JSON answer of a child process that imports MLX: `python ARGUMENTS`.

    `question` goes to its standard input as JSON. Raises one of `CHILD_FAULTS`, which `last_line`
    tells.
    """
    # Without close_fds CPython spawns instead of forking a process that maps a model.
    done = subprocess.run(
        [sys.executable, *arguments],
        input=msgspec.json.encode(question),
        env={**env, **for_mlx(env)},
        capture_output=True,
        timeout=timeout_s,
        check=True,
        close_fds=False,
    )
    return msgspec.json.decode(done.stdout, type=kind)


def program_file(module: str) -> Path:
    """File of a module, run without its package."""
    return Path(__file__).parents[2].joinpath(*module.split(".")).with_suffix(".py")


def last_line(error: Exception) -> str:
    """Last line of a child's error output, else the error itself."""
    lines = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
    if lines:
        return lines[-1]
    return str(error)


class MemoryBudget(Struct, frozen=True):
    """Bytes of a machine, and how many of them models may take."""

    total: int
    usable: int
    half_bytes: int
    """Size of a number of half precision: 4 where MLX computes on a CPU, which widens them."""
    owner: str
    working_set: int = 0
    """Bytes that the GPU should hold; 0 where unknown."""
    buffered_bytes: int = 0
    """Freed arrays that a command buffer may keep, beyond the cache of freed buffers."""


def this_memory(env: Mapping[str, str]) -> MemoryBudget:
    """Budget of this computer; `MLX_STACK_MEMORY=24GB` overrides its total. Raises SetupError."""
    amount = env.get(MEMORY_VARIABLE)
    if amount:
        return replace(
            memory_of(bytes_of(amount)), owner=f"this machine ({MEMORY_VARIABLE}={amount})"
        )
    memory = memory_of(psutil.virtual_memory().total)
    is_metal = sys.platform == "darwin" and memory.half_bytes == 2
    wired = 0
    if is_metal:
        wired = _wired_limit()
    if wired:
        return _of_mac(memory.total, wired, memory.owner, _buffer_settings())
    return memory


def memory_of(total: int) -> MemoryBudget:
    """Budget of this computer, if it had `total` bytes."""
    half_bytes = 2
    if _computes_on_cpu():
        half_bytes = 4
    is_metal = sys.platform == "darwin" and half_bytes == 2
    if not is_metal:
        return MemoryBudget(total, int(total * LINUX_SHARE), half_bytes, "this machine")
    return _of_mac(total, mac_share(total), "this machine", _buffer_settings())


def mac_memory(text: str) -> MemoryBudget:
    """Budget of a Mac with `text` memory, e.g. 24GB. Raises SetupError."""
    total = bytes_of(text)
    unit = " GB"
    if text.strip()[-1:].isalpha():
        unit = ""
    owner = f"a Mac with {text.strip()}{unit}"
    return _of_mac(total, mac_share(total), owner, mac_limits("", total))


def _buffer_settings() -> dict[str, str]:
    return {**os.environ, **buffer_variables(os.environ)}


def _of_mac(total: int, working_set: int, owner: str, variables: Mapping[str, str]) -> MemoryBudget:
    # MLX drops cached buffers where memory is short, so that kept arrays take their place first.
    excess = max(0, buffered_bytes(variables) - buffer_cache_limit(working_set))
    return MemoryBudget(total, memory_limit(working_set), 2, owner, working_set, excess)


def mac_share(total: int) -> int:
    """Bytes of `total` for a Mac's GPU, by default or sysctl."""
    share = SMALL_MAC_SHARE
    if total >= LARGE_MAC_BYTES:
        share = LARGE_MAC_SHARE
    return int(total * share)


def buffer_cache_limit(working_set: int) -> int:
    """Bytes of freed buffers for MLX under this working set."""
    return min(MAX_BUFFER_CACHE_BYTES, int(working_set * BUFFER_CACHE_SHARE))


def memory_limit(working_set: int) -> int:
    """Bytes of this working set for models, workspace included, beside freed buffers.

    Above 0.95 of it MLX empties its cache for each new buffer (see MLX's
    `backend/metal/allocator.cpp`). Outside of a prefill the arrays of the workspace are not there.
    """
    filled = int(working_set * FILLED_SHARE) + MIN_WORKSPACE_BYTES
    return min(working_set - buffer_cache_limit(working_set), filled)


def bytes_of(text: str) -> int:
    """Bytes of `24`, `24GB`, `24 GiB`, `24g` or `24576M`, all equal.

    Raises SetupError for nonsense, and for less than a MiB or more than 1,024 TiB.
    """
    match = AMOUNT.fullmatch(text.strip())
    amount = 0
    if match:
        amount = float(match[1]) * 1024 ** POWERS[(match[2] or "G").upper()]
    if not MIN_BYTES <= amount <= MAX_BYTES:
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
    if output.isdigit():
        return int(output) * 2**20
    return 0


def _computes_on_cpu() -> bool:
    if os.environ.get(CPU_VARIABLE):
        return True
    return sys.platform != "darwin" and not any(map(version_of, CUDA_PACKAGES))
