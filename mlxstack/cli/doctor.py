"""`doctor`: checks of machine, home and models, one function each."""

import platform
import resource
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from mlxstack import __version__
from mlxstack.cli.check_result import CheckLevel, CheckResult
from mlxstack.cli.preset_list import catalog, with_fits
from mlxstack.cli.verification.mac_report import interrupted_run
from mlxstack.cli.verification.soak_record import interrupted_soak
from mlxstack.config import presets
from mlxstack.config.overrides import unknown_variables, unread_variables
from mlxstack.config.presets import BUILTIN_MODEL
from mlxstack.core.errors import SetupError, StackError
from mlxstack.core.formatting import size
from mlxstack.core.preset import Preset, ServerSpec, Wired
from mlxstack.features.vision.images.families import has_pillow
from mlxstack.host import services
from mlxstack.host.command_buffers import buffer_limits
from mlxstack.host.descriptors import REQUIRED, require_limit
from mlxstack.host.hardware import (
    CHILD_FAULTS,
    MEMORY_VARIABLE,
    ask_mlx,
    find_openblas,
    last_line,
    this_hardware,
    this_memory,
    version_of,
)
from mlxstack.host.home import HOME_VARIABLE, Home, make_folder
from mlxstack.host.macos import MIN_MACOS, SystemVersion, gpu_name, gpu_panics, system_version
from mlxstack.host.memory_pressure import sysctl
from mlxstack.host.power_state import PowerSource, PowerState, power_state
from mlxstack.host.process import listener, refusal
from mlxstack.host.services import owner, read_json, write_json
from mlxstack.models import model_files
from mlxstack.models.model_files import vision_files, why_text_only
from mlxstack.planner.candidate import excerpts, of_preset

REINSTALL = "in a clone, run `uv tool install --reinstall .` or `pipx install --force .`"
MAX_S = 60.0
WEIGHTS_SHARE = 0.9
"""Maximum weights share of the working set, for KV and activations."""
HALF_DOWNLOADS = "*/blobs/*.incomplete"
LOW_DISK_BYTES = 5 * 2**30
LOW_MEMORY_BYTES = 8 * 2**30
UNSTORED = "..tmp-*"
"""Names of the temporary files of `store.durable`."""
N_SHOWN = 3
TEMPLATE_FILES = (
    "chat_template.jinja", "chat_template.json", "tokenizer_config.json", "tokenizer.json",
    "config.json",
)  # fmt: skip
"""Files of a model that its format and its template depend on."""


ok = partial(CheckResult, CheckLevel.OK)
warn = partial(CheckResult, CheckLevel.WARN)
bad = partial(CheckResult, CheckLevel.BAD)


def warn_if(is_odd: bool, subject: str, detail: str, remedy: str) -> CheckResult:
    """Warning with its remedy, else OK."""
    if is_odd:
        return warn(subject, detail, remedy)
    return ok(subject, detail)


def examine(home: Home, env: Mapping[str, str]) -> list[CheckResult]:
    """Run all checks, in the order of their repair."""
    checks = (
        _system(),
        _macos(),
        _command_buffers(env),
        power(power_state()),
        _packages(),
        _memory(),
        _descriptors(),
        device(env, home),
        ceiling(env),
        _blas(env),
        _home(home),
        model_cache(),
        _presets(home),
        templates(env, home),
        images(home),
        _variables(env),
        _services(home),
        _left_behind(home),
        unfinished(home),
        _port(home),
    )
    return [finding for check in checks for finding in _all_of(check)]


def _all_of(check: Iterator[CheckResult]) -> Iterator[CheckResult]:
    """Results of a check; an unreadable file is one too."""
    try:
        yield from check
    except OSError as error:
        yield bad("files", f"{error.filename}: {error.strerror}", "correct its permissions")


def _system() -> Iterator[CheckResult]:
    name = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    if sys.platform == "darwin" and platform.machine() != "arm64":
        yield bad(
            "system",
            f"{name}: MLX needs Apple silicon",
            "use a native arm64 Python, or a Linux machine",
        )
    elif sys.platform not in {"darwin", "linux"}:
        yield bad("system", name, "use macOS on Apple silicon, or Linux")
    else:
        yield ok("system", name)


def _macos() -> Iterator[CheckResult]:
    if platform.system() == "Darwin":
        yield from macos(system_version(), sysctl(b"iogpu.wired_limit_mb"), gpu_panics())


def macos(
    system: SystemVersion, wired_limit_mb: int | None, panics: Sequence[Path]
) -> Iterator[CheckResult]:
    """Version of macOS, limit of the GPU's memory, recent panics of its driver."""
    detail = str(system)
    version = system.version
    if not version:
        yield warn("macos", detail, "see `sw_vers`; MLX needs macOS 14 or later")
    elif version < MIN_MACOS:
        remedy = f"update macOS to {MIN_MACOS[0]} or later: MLX has no packages for older ones"
        yield bad("macos", detail, remedy)
    else:
        if version[0] == MIN_MACOS[0]:
            detail += ": without residency sets, so device.wired has no effect"
        yield ok("macos", detail)
    limit = "not set, macOS decides"
    if wired_limit_mb:
        limit = f"{wired_limit_mb} MiB"
    yield ok("gpu memory", f"iogpu.wired_limit_mb is {limit}")
    if panics:
        detail = f"{len(panics)} in 30 days name the GPU driver (IOGPU), the last one {panics[-1]}"
        remedy = "keep device.wired off, and see `panic` in docs/troubleshooting.md"
        yield warn("panics", detail, remedy)


def power(state: PowerState) -> Iterator[CheckResult]:
    """Power source and mode, heat, memory pressure, which slow a model."""
    remedies = []
    if state.source is PowerSource.BATTERY:
        remedies.append("plug in the charger")
    if state.is_low_power:
        remedies.append("switch low power mode off")
    if state.thermal_level:
        remedies.append("let it cool down: the system throttles for heat")
    if state.pressure != "calm":
        remedies.append("end programs that take memory")
    yield warn_if(bool(remedies), "power", str(state), "; ".join(remedies))


def _command_buffers(env: Mapping[str, str]) -> Iterator[CheckResult]:
    if limits := buffer_limits(env):
        yield ok("buffers", "MLX's command buffers: " + ", ".join(map(str, limits)))


def _packages() -> Iterator[CheckResult]:
    for package in ("mlx", "mlx-lm"):
        version = version_of(package)
        yield ok(package, version) if version else bad(package, "not installed", REINSTALL)


def _memory() -> Iterator[CheckResult]:
    hardware = this_hardware()
    detail = (
        f"{size(hardware.total_bytes)}, {size(hardware.available_bytes)} available, {hardware.chip}"
    )
    is_low = hardware.total_bytes < LOW_MEMORY_BYTES
    yield warn_if(is_low, "memory", detail, "use small models, such as `demo`")


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
        yield bad("open files", detail, remedy)
    else:
        yield ok("open files", detail)


def _blas(env: Mapping[str, str]) -> Iterator[CheckResult]:
    if sys.platform != "linux":
        return
    library = find_openblas()
    if library is not None:
        yield ok("blas", f"{library} is preloaded into workers")
    elif "openblas" in env.get("LD_PRELOAD", ""):
        yield ok("blas", f"LD_PRELOAD={env['LD_PRELOAD']}")
    else:
        yield warn(
            "blas",
            "OpenBLAS is not installed; MLX on a CPU is 10 to 25 times slower without it",
            "install it (Debian: apt install libopenblas0-pthread)",
        )


def _unusable(folder: Path, root: Path) -> str | None:
    """Why nothing can be made in `folder`, by trying; `root` is there or below."""
    try:
        with suppress(FileNotFoundError):
            root.stat()
        with tempfile.TemporaryDirectory(prefix=".mlx-stack-", dir=folder):
            return None
    except OSError as error:
        return error.strerror


def _home(home: Home) -> Iterator[CheckResult]:
    ways = (home.root, *home.root.parents)
    existing = next(folder for folder in ways if folder.is_symlink() or folder.exists())
    if (fault := _unusable(existing, home.root)) is not None:
        detail = f"{home.root} cannot be used: nothing can be made in {existing} ({fault})"
        yield bad("home", detail, f"set {HOME_VARIABLE} to another folder")
        return
    if existing != home.root:
        yield ok("home", f"{home.root} will be made by the first `up`")
        return
    mode = stat.S_IMODE(home.root.stat().st_mode)
    if mode & 0o077:
        detail = f"{home.root} is open to others (mode {mode:o})"
        yield warn("home", detail, f"chmod 700 {home.root}")
    else:
        yield ok("home", str(home.root))
    free = shutil.disk_usage(home.root).free
    remedy = "free some space for saved agents"
    yield warn_if(free < LOW_DISK_BYTES, "disk", f"{size(free)} free", remedy)


def _presets(home: Home) -> Iterator[CheckResult]:
    listings = with_fits(catalog(home), home)
    wrong = [listing for listing in listings if listing.error is not None]
    for listing in wrong:
        yield warn("preset", str(listing.error), f"correct {listing.source}")
    n_fitting = sum(listing.fits is True for listing in listings)
    n_well = len(listings) - len(wrong)
    yield ok("presets", f"{n_well} read well, {n_fitting} fit into the memory of this machine")


def _variables(env: Mapping[str, str]) -> Iterator[CheckResult]:
    for name in unknown_variables(env):
        yield bad("variable", f"{name} names no key of a preset", f"unset {name}")
    for name, warning in unread_variables(env).items():
        yield warn("variable", warning, f"unset {name}")


def _services(home: Home) -> Iterator[CheckResult]:
    for name in services.names(home):
        state = owner(home, name)
        if state is not None:
            yield ok("service", f"{name} runs at {state.spec.url}")
        elif home.pid_file(name).exists():
            detail = f"{name} crashed and left {home.pid_file(name)}"
            yield warn("service", detail, f"mlx-stack down {name}")


def _left_behind(home: Home) -> Iterator[CheckResult]:
    """Partial files of killed processes; a running service may own some."""
    if services.running(home):
        return
    stored = (file for part in (home.kv, home.slots, home.agents) for file in part.rglob(UNSTORED))
    halves = [*stored, *home.run.rglob(".*.json.*"), *home.run.glob(".*.pid.*")]
    if halves:
        n_bytes = sum(file.stat().st_size for file in halves)
        names = " ".join(map(str, halves[:N_SHOWN]))
        if len(halves) > N_SHOWN:
            names += " ..."
        detail = f"{len(halves)} half-written files, {size(n_bytes)}"
        yield warn("stale", detail, f"delete them: rm {names}")


def unfinished(home: Home) -> Iterator[CheckResult]:
    """Runs of `verify` that a panic or a kill ended."""
    soak = interrupted_soak(home)
    if soak is not None:
        remedy = f"send {home.soak_file} and these reports in an issue"
        yield warn("soak", str(soak), f"{remedy}; rm {home.soak_file} ends this line")
    run = interrupted_run(home)
    if run is not None:
        remedy = f"send it in an issue; rm {run.path} ends this line"
        yield warn("verify --mac", str(run), remedy)


def _port(home: Home) -> Iterator[CheckResult]:
    server = ServerSpec()
    if any(state.spec.url.endswith(f":{server.port}") for state in services.running(home)):
        return
    if refusal(server.host, server.port) is None:
        yield ok("port", f"{server.port} is free")
    else:
        who = listener(server.port) or "another program"
        detail = f"{server.port} is taken by {who}"
        yield warn("port", detail, "start with --port, or end that program")


def device(env: Mapping[str, str], home: Home) -> Iterator[CheckResult]:
    """MLX's device, read in a child process, since MLX may crash.

    By `-m`, so that an engine that cannot be imported is reported.
    """
    try:
        facts = ask_mlx(["-m", "mlxstack.engine.device_facts"], dict[str, Any], MAX_S, env=env)
    except CHILD_FAULTS as error:
        remedy = f"{REINSTALL}, and read what MLX says"
        yield bad("device", f"MLX does not start: {last_line(error)}", remedy)
        return
    most = ""
    if facts["limit_bytes"]:
        most = f", at most {size(facts['limit_bytes'])} at once"
    name = gpu_name(facts) if facts["kind"] == "gpu" else facts["name"]
    detail = f"MLX computes on the {facts['kind']}, {name}{most}"
    is_slow = sys.platform == "darwin" and facts["kind"] != "gpu"
    remedy = "use a native arm64 Python; a virtual machine has no GPU"
    yield warn_if(is_slow, "device", detail, remedy)
    if facts["limit_bytes"]:
        yield from large_weights(home, facts["limit_bytes"])
        yield from wired(home)


def wired(home: Home) -> Iterator[CheckResult]:
    """Presets that wire their weights on a GPU."""
    names = [name for name, preset in _loadable(home) if preset.device.wired is Wired.WEIGHTS]
    detail = "device.wired is off"
    if names:
        detail = f"device.wired is weights in {', '.join(names)}"
    yield ok("wired", detail)


def large_weights(home: Home, limit_bytes: int) -> Iterator[CheckResult]:
    """Presets whose downloaded weights fill the GPU's working set of `limit_bytes`."""
    for name, preset in _loadable(home):
        with suppress(StackError):
            candidate = of_preset(preset)
            n_bytes = candidate.weights.n_bytes()
            if candidate.is_measured and n_bytes > WEIGHTS_SHARE * limit_bytes:
                detail = (
                    f"{name}: {size(n_bytes)} of weights are more than {WEIGHTS_SHARE:.0%} of "
                    f"the {size(limit_bytes)} that the GPU should hold"
                )
                remedy = "take fewer bits per weight, or a smaller model"
                yield warn("weights", detail, remedy)


def ceiling(env: Mapping[str, str]) -> Iterator[CheckResult]:
    """Memory for models, as `plan` and `up` compute it."""
    try:
        memory = this_memory(env)
    except SetupError as error:
        yield bad("ceiling", error.message, f"unset {MEMORY_VARIABLE}")
        return
    wide = ""
    if memory.half_bytes > 2:
        wide = "; half precision takes twice its room on a CPU"
    detail = f"models may take {size(memory.usable)} of {size(memory.total)}{wide}"
    yield ok("ceiling", detail)


def model_cache() -> Iterator[CheckResult]:
    """Models in the Hugging Face cache, and unfinished downloads."""
    from mlxstack.models.hub import cache_folder
    from mlxstack.models.local_models import local_models

    folder = cache_folder()
    if not folder.is_dir():
        yield ok("models", f"none downloaded; they will go to {folder}")
        return
    sizes = [model.n_bytes for model in local_models() if model.where == "hub"]
    detail = f"{len(sizes)} downloaded, {size(sum(sizes))} in {folder}"
    yield ok("models", detail)
    halves = list(folder.glob(HALF_DOWNLOADS))
    if halves:
        n_bytes = sum(file.stat().st_size for file in halves)
        detail = f"{len(halves)} files half downloaded, {size(n_bytes)}"
        remedy = f"`mlx-stack up` resumes them; or rm {folder}/{HALF_DOWNLOADS}"
        yield warn("models", detail, remedy)


def _loadable(home: Home) -> Iterator[tuple[str, Preset]]:
    """Presets without errors, by name."""
    for name in presets.listed(home):
        with suppress(StackError):
            yield name, presets.load(name, home).preset


def _downloaded(home: Home) -> Iterator[tuple[Path, Preset, str]]:
    """Folders of downloaded models with their presets and names of these."""
    for name, preset in _loadable(home):
        with suppress(StackError):
            files = model_files.find_model(preset.model, excerpts())
            if files.weights is not None and preset.model.id != BUILTIN_MODEL:
                yield files.source.parent, preset, name


def images(home: Home) -> Iterator[CheckResult]:
    """Whether the downloaded models take images, by preset."""
    for folder, preset, name in _downloaded(home):
        why_not = why_text_only(folder, preset.kv.bits)
        bits = preset.kv.bits
        level = CheckLevel.OK
        detail = f"{name}: text only, {why_not}"
        remedy = ""
        if not why_not:
            detail = f"{name}: takes images"
        elif not has_pillow() and vision_files(folder) is not None:
            level = CheckLevel.WARN
            remedy = "install Pillow into the environment of mlx-stack: pip install pillow"
        elif not why_text_only(folder):
            level = CheckLevel.WARN
            remedy = f"set kv.bits to 16 in its preset, which has {bits}, if it is to take images"
        yield CheckResult(level, "images", detail, remedy)


def templates(env: Mapping[str, str], home: Home) -> Iterator[CheckResult]:
    """Notes on the chat templates of the downloaded models that presets name."""
    names: dict[Path, str] = {}
    for folder, _, name in _downloaded(home):
        names.setdefault(folder, name)
    for folder, name in names.items():
        remedy = f"`mlx-stack template {name}` shows more"
        try:
            notes = template_notes(folder, env, home)
        except CHILD_FAULTS as error:
            detail = f"{name}: it cannot be read: {last_line(error)}"
            yield warn("template", detail, remedy)
            continue
        for note in notes:
            yield warn("template", f"{name}: {note}", remedy)


def template_notes(folder: Path, env: Mapping[str, str], home: Home) -> tuple[str, ...]:
    """Template notes of a model, cached by digest of its files."""
    digest = xxhash.xxh3_128(__version__.encode())
    for name in TEMPLATE_FILES:
        file = folder / name
        digest.update(file.read_bytes() if file.is_file() else name.encode())
    cache_file = home.run / "templates" / f"{digest.hexdigest()}.json"
    cached: tuple[str, ...] | None = read_json(cache_file, tuple)
    if cached is not None:
        return cached
    command = ["-m", "mlxstack.cli.main", "template", str(folder), "--json"]
    notes = tuple(ask_mlx(command, dict[str, Any], MAX_S, env=env)["notes"])
    if home.run.is_dir():
        make_folder(cache_file.parent)
        write_json(cache_file, notes)
    return notes
