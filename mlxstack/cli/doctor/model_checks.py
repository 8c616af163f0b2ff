"""What `doctor` finds about models: what MLX computes on, how much fits, what is downloaded."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlxstack.cli.doctor.result import CheckLevel, CheckResult
from mlxstack.core.errors import SetupError, StackError
from mlxstack.host import presets
from mlxstack.host.hardware import amount, for_mlx
from mlxstack.host.home import Home
from mlxstack.host.memory_budget import VARIABLE, this_memory
from mlxstack.service import plan_candidate

LONGEST_S = 60.0
WEIGHTS_SHARE = 0.9
"""Share of the working set beyond which weights leave too little for KV and activations."""
HALF_DOWNLOADS = "*/blobs/*.incomplete"


def device(env: Mapping[str, str], home: Home) -> Iterator[CheckResult]:
    """What MLX says of itself, in a process of its own: where it crashes, `doctor` does not."""
    try:
        told = _ask_mlx(env)
    except (OSError, ValueError, subprocess.SubprocessError) as why:
        remedy = "pip install mlx-stack into this environment again, and read what MLX says"
        yield CheckResult(
            CheckLevel.BAD, "device", f"MLX does not start: {_last_line(why)}", remedy
        )
        return
    most = f", at most {amount(told['limit_bytes'])} at once" if told["limit_bytes"] else ""
    detail = f"MLX computes on the {told['kind']}, {told['name']}{most}"
    if sys.platform == "darwin" and told["kind"] != "gpu":
        remedy = "use a native arm64 Python; a virtual machine has no GPU"
        yield CheckResult(CheckLevel.WARN, "device", detail, remedy)
    else:
        yield CheckResult(CheckLevel.OK, "device", detail)
    if told["limit_bytes"]:
        yield from large_weights(home, told["limit_bytes"])


def large_weights(home: Home, limit_bytes: int) -> Iterator[CheckResult]:
    """Presets whose downloaded weights fill the GPU's working set of `limit_bytes`."""
    for name in presets.listed(home):
        with suppress(StackError):
            candidate = plan_candidate.of_preset(presets.load(name, home).preset)
            n_bytes = candidate.weights.n_bytes()
            if candidate.is_measured and n_bytes > WEIGHTS_SHARE * limit_bytes:
                detail = (
                    f"{name}: {amount(n_bytes)} of weights are more than {WEIGHTS_SHARE:.0%} of "
                    f"the {amount(limit_bytes)} that the GPU should hold"
                )
                remedy = "take fewer bits per weight, or a smaller model"
                yield CheckResult(CheckLevel.WARN, "weights", detail, remedy)


def ceiling(env: Mapping[str, str]) -> Iterator[CheckResult]:
    """What models may take, as `plan` and `up` reckon."""
    try:
        memory = this_memory(env)
    except SetupError as why:
        yield CheckResult(CheckLevel.BAD, "ceiling", why.message, f"unset {VARIABLE}")
        return
    wide = "; half precision takes twice its room on a CPU" if memory.half_bytes > 2 else ""
    detail = f"models may take {amount(memory.usable)} of {amount(memory.total)}{wide}"
    yield CheckResult(CheckLevel.OK, "ceiling", detail)


def model_cache() -> Iterator[CheckResult]:
    """What was downloaded from the hub, and what was not finished."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE)
    if not folder.is_dir():
        yield CheckResult(CheckLevel.OK, "models", f"none downloaded; they will go to {folder}")
        return
    cache = scan_cache_dir(folder)
    n_models = sum(repo.repo_type == "model" for repo in cache.repos)
    detail = f"{n_models} downloaded, {amount(cache.size_on_disk)} in {folder}"
    yield CheckResult(CheckLevel.OK, "models", detail)
    halves = list(folder.glob(HALF_DOWNLOADS))
    if halves:
        n_bytes = sum(file.stat().st_size for file in halves)
        detail = f"{len(halves)} files half downloaded, {amount(n_bytes)}"
        remedy = f"`mlx-stack up` goes on with them; or rm {folder}/{HALF_DOWNLOADS}"
        yield CheckResult(CheckLevel.WARN, "models", detail, remedy)


def _ask_mlx(env: Mapping[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "mlxstack.engine.device"]
    done = subprocess.run(
        command, env={**env, **for_mlx(env)}, capture_output=True, timeout=LONGEST_S, check=True
    )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def _last_line(why: Exception) -> str:
    said = getattr(why, "stderr", None) or b""
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else str(why)
