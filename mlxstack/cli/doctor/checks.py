"""The examinations of `doctor`, one function each; those of models are in `model_findings`."""

import os
import platform
import resource
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

from mlxstack.cli.doctor.model_checks import ceiling, device, model_cache
from mlxstack.cli.doctor.result import CheckLevel, CheckResult
from mlxstack.cli.preset_list import catalog
from mlxstack.core.errors import SetupError
from mlxstack.core.preset import ServerSpec
from mlxstack.host import services
from mlxstack.host.descriptors import REQUIRED, require_limit
from mlxstack.host.hardware import amount, find_openblas, this_hardware
from mlxstack.host.home import HOME_VARIABLE, Home
from mlxstack.host.overrides import unknown_variables
from mlxstack.host.process import listener, refusal
from mlxstack.host.service_state import owner

LOW_DISK_BYTES = 5 * 2**30
LOW_MEMORY_BYTES = 8 * 2**30
UNSTORED = "..tmp-*"
"""How `store.durable` calls what it has not finished."""
N_SHOWN = 3


def examine(home: Home, env: Mapping[str, str]) -> list[CheckResult]:
    """Everything, in the order in which one would repair it."""
    looks = (
        _system(),
        _packages(),
        _memory(),
        _descriptors(),
        device(env, home),
        ceiling(env),
        _blas(env),
        _home(home),
        model_cache(),
        _presets(home),
        _variables(env),
        _services(home),
        _left_behind(home),
        _port(home),
    )
    return [finding for look in looks for finding in _all_of(look)]


def _all_of(look: Iterator[CheckResult]) -> Iterator[CheckResult]:
    """What it finds; where it may not look, that is a finding too, and the others go on."""
    try:
        yield from look
    except OSError as why:
        remedy = "give yourself the right to it"
        yield CheckResult(CheckLevel.BAD, "files", f"{why.filename}: {why.strerror}", remedy)


def _system() -> Iterator[CheckResult]:
    name = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        yield CheckResult(
            CheckLevel.BAD,
            "system",
            f"{name}: MLX needs Apple silicon",
            "use a native arm64 Python, or a Linux machine",
        )
    elif sys.platform not in {"darwin", "linux"}:
        yield CheckResult(CheckLevel.BAD, "system", name, "use macOS on Apple silicon, or Linux")
    else:
        yield CheckResult(CheckLevel.OK, "system", name)


def _packages() -> Iterator[CheckResult]:
    for package in ("mlx", "mlx-lm"):
        try:
            yield CheckResult(CheckLevel.OK, package, version(package))
        except PackageNotFoundError:
            remedy = "pip install mlx-stack into this environment again"
            yield CheckResult(CheckLevel.BAD, package, "not installed", remedy)


def _memory() -> Iterator[CheckResult]:
    here = this_hardware()
    detail = f"{amount(here.total_bytes)}, {amount(here.available_bytes)} available, {here.chip}"
    if here.total_bytes < LOW_MEMORY_BYTES:
        yield CheckResult(CheckLevel.WARN, "memory", detail, "use small models, such as `demo`")
    else:
        yield CheckResult(CheckLevel.OK, "memory", detail)


def _descriptors() -> Iterator[CheckResult]:
    soft, hard = (
        "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    detail = f"ulimit -n is {soft}, at most {hard}"
    try:
        require_limit()
    except SetupError:
        remedy = f"start it with a hard limit of at least {REQUIRED}; no model can be loaded"
        yield CheckResult(CheckLevel.BAD, "open files", detail, remedy)
    else:
        yield CheckResult(CheckLevel.OK, "open files", detail)


def _blas(env: Mapping[str, str]) -> Iterator[CheckResult]:
    if sys.platform != "linux":
        return
    agent_store = find_openblas()
    if agent_store is not None:
        yield CheckResult(CheckLevel.OK, "blas", f"{agent_store} is preloaded into workers")
    elif "openblas" in env.get("LD_PRELOAD", ""):
        yield CheckResult(CheckLevel.OK, "blas", f"LD_PRELOAD={env['LD_PRELOAD']}")
    else:
        yield CheckResult(
            CheckLevel.WARN,
            "blas",
            "OpenBLAS is not installed; MLX on a CPU is 10 to 25 times slower without it",
            "install it (Debian: apt install libopenblas0-pthread)",
        )


def _home(home: Home) -> Iterator[CheckResult]:
    there = next(one for one in (home.root, *home.root.parents) if one.exists())
    if not (there.is_dir() and os.access(there, os.R_OK | os.W_OK | os.X_OK)):
        detail = f"{home.root} cannot be used: {there} is no folder that you may write to"
        remedy = f"make it one, or set {HOME_VARIABLE} to another"
        yield CheckResult(CheckLevel.BAD, "home", detail, remedy)
        return
    if there != home.root:
        yield CheckResult(CheckLevel.OK, "home", f"{home.root} will be made by the first `up`")
        return
    mode = stat.S_IMODE(home.root.stat().st_mode)
    if mode & 0o077:
        detail = f"{home.root} is open to others (mode {mode:o})"
        yield CheckResult(CheckLevel.WARN, "home", detail, f"chmod 700 {home.root}")
    else:
        yield CheckResult(CheckLevel.OK, "home", str(home.root))
    free = shutil.disk_usage(home.root).free
    if free < LOW_DISK_BYTES:
        yield CheckResult(
            CheckLevel.WARN, "disk", f"{amount(free)} free", "free some space for saved agents"
        )
    else:
        yield CheckResult(CheckLevel.OK, "disk", f"{amount(free)} free")


def _presets(home: Home) -> Iterator[CheckResult]:
    slot_files = catalog(home)
    wrong = [one for one in slot_files if one.error is not None]
    for one in wrong:
        yield CheckResult(CheckLevel.WARN, "preset", str(one.error), f"correct {one.source}")
    yield CheckResult(CheckLevel.OK, "presets", f"{len(slot_files) - len(wrong)} can be started")


def _variables(env: Mapping[str, str]) -> Iterator[CheckResult]:
    for name in unknown_variables(env):
        yield CheckResult(
            CheckLevel.BAD, "variable", f"{name} names no key of a preset", f"unset {name}"
        )


def _services(home: Home) -> Iterator[CheckResult]:
    for name in services.names(home):
        state = owner(home, name)
        if state is not None:
            yield CheckResult(CheckLevel.OK, "service", f"{name} runs at {state.plan.url}")
        elif home.pid_file(name).exists():
            detail = f"{name} crashed and left {home.pid_file(name)}"
            yield CheckResult(CheckLevel.WARN, "service", detail, f"mlx-stack down {name}")


def _left_behind(home: Home) -> Iterator[CheckResult]:
    """Files that somebody who was killed had not finished; while services run, they may grow."""
    if services.running(home):
        return
    stored = (file for part in (home.kv, home.slots, home.agents) for file in part.rglob(UNSTORED))
    halves = [*stored, *home.run.rglob(".*.json.*"), *home.run.glob(".*.pid.*")]
    if halves:
        n_bytes = sum(file.stat().st_size for file in halves)
        shown = " ".join(map(str, halves[:N_SHOWN])) + (" ..." if len(halves) > N_SHOWN else "")
        detail = f"{len(halves)} half-written files, {amount(n_bytes)}"
        yield CheckResult(CheckLevel.WARN, "stale", detail, f"nobody needs them: rm {shown}")


def _port(home: Home) -> Iterator[CheckResult]:
    server = ServerSpec()
    if any(one.plan.url.endswith(f":{server.port}") for one in services.running(home)):
        return
    if refusal(server.host, server.port) is None:
        yield CheckResult(CheckLevel.OK, "port", f"{server.port} is free")
    else:
        who = listener(server.port) or "another program"
        detail = f"{server.port} is taken by {who}"
        yield CheckResult(CheckLevel.WARN, "port", detail, "start with --port, or end that program")
