"""Hardware of this machine: chip, cores, memory; MLX's BLAS on Linux."""

import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psutil
from msgspec import Struct

OPENBLAS = "libopenblas.so.0"
TUNABLES = ("glibc.malloc.hugetlb=1", "glibc.malloc.arena_max=2")
ARENAS = "MALLOC_ARENA_MAX"
SLEEP_AFTER = "OPENBLAS_THREAD_TIMEOUT"
SLEEP_AFTER_CYCLES = "12"
"""Exponent of 2. OpenBLAS waits for 2**26 processor cycles by default."""
LIBRARY_FOLDERS = ("/usr/lib", "/usr/lib64", "/usr/local/lib", "/opt/OpenBLAS/lib")
THREADED_FOLDERS = ("openblas-pthread", "openblas-openmp", "openblas-serial")


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
        command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() or platform.machine()
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine()


def find_openblas(folders: tuple[str, ...] = LIBRARY_FOLDERS) -> Path | None:
    """OpenBLAS to preload on Linux, preferably threaded; else None.

    MLX's CPU wheel links the slow reference BLAS; preloading this one is all that it takes.
    """
    if platform.system() != "Linux":
        return None
    triplet = f"{platform.machine()}-linux-gnu"
    for folder in folders:
        for place in (Path(folder) / triplet, Path(folder)):
            for build in (*THREADED_FOLDERS, "."):
                library = place / build / OPENBLAS
                if library.is_file():
                    return library
    return None


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
    return {} if system != "Linux" or SLEEP_AFTER in env else {SLEEP_AFTER: SLEEP_AFTER_CYCLES}


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
    set_by_user = {one.partition("=")[0] for one in before.split(":")}
    if ARENAS in env:
        set_by_user.add("glibc.malloc.arena_max")
    added = [one for one in TUNABLES if one.partition("=")[0] not in set_by_user]
    return {"GLIBC_TUNABLES": ":".join([before, *added] if before else added)} if added else {}


def for_mlx(env: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process that computes with MLX here."""
    system = platform.system()
    return preload(env, find_openblas()) | blas_sleep(env, system) | malloc_tunables(env, system)
