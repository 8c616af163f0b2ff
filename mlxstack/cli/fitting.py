"""Refuses a start that cannot fit into memory, with the sum and with what would fit."""

from collections.abc import Mapping

import psutil
from msgspec import Struct

from mlxstack.cli import candidate
from mlxstack.cli.candidate import Candidate
from mlxstack.core.errors import BadRequest, SetupError
from mlxstack.core.preset import Preset
from mlxstack.host import services
from mlxstack.host.machine import amount
from mlxstack.host.memory import VARIABLE, Memory, this_memory
from mlxstack.host.paths import Home
from mlxstack.host.state import State, read_json
from mlxstack.policy.advice import Option, nearest
from mlxstack.policy.capacity import Load, Need, need
from mlxstack.policy.geometry import LayerKind, uncapped


class Tenant(Struct, frozen=True):
    """A service of ours that runs already, and the bytes that it may take."""

    name: str
    n_bytes: int


def check_memory(preset: Preset, home: Home, env: Mapping[str, str]) -> str | None:
    """Raises SetupError when the preset cannot fit beside what runs.

    A model whose needs nobody can tell beforehand passes, with a word on why.
    """
    memory = this_memory(env)
    try:
        found = candidate.of_preset(preset)
        load = found.load(memory.half_bytes)
    except (SetupError, BadRequest) as why:
        if isinstance(why, BadRequest) and (why.param or "").startswith("kv."):
            raise SetupError(f"{why.param}: {why.message}") from why
        return f"whether `{preset.name}` fits into memory is not checked: {why.message}"
    _refuse_whole_windows(preset, load)
    others = tenants(home, preset.name, memory)
    free = memory.usable - sum(one.n_bytes for one in others)
    if need(load).total > free:
        raise SetupError(_refusal(found, load, memory, others))
    return None


def tenants(home: Home, but: str, memory: Memory) -> list[Tenant]:
    """The other services that run here; the sum of all is what must fit."""
    running = [state for state in services.running(home) if state.plan.name != but]
    return [Tenant(one.plan.name, _taken(home, one, memory)) for one in running]


def breakdown(load: Load, is_measured: bool) -> list[tuple[str, int, str]]:
    """What takes how many bytes, and a word on each."""
    parts: Need = need(load)
    n_slots, n_ctx, geometry = load.n_slots, load.n_ctx, load.geometry
    return [
        ("weights", parts.weights, "measured" if is_measured else "estimated"),
        ("KV full", parts.kv_full, f"{n_slots} x {n_ctx} tokens x {geometry.growth} bytes"),
        ("KV windows", parts.kv_state, "sliding windows and other states of fixed size"),
        ("workspace", parts.workspace, f"activations of {load.bite} tokens, logits"),
        ("margin", parts.margin, "tokenizer, kernels, the process"),
    ]


def settings(option: Option, load: Load) -> str:
    """An option as `--set` options, only what differs from `load`."""
    changes = (
        ("slots.count", option.n_slots, load.n_slots),
        ("slots.n_ctx", option.n_ctx, load.n_ctx),
        ("kv.bits", option.bits, load.geometry.bits),
    )
    return " ".join(f"--set {key}={new}" for key, new, old in changes if new != old)


def _refusal(found: Candidate, load: Load, memory: Memory, others: list[Tenant]) -> str:
    lines = breakdown(load, found.is_measured)
    lines += [(f"`{one.name}`", one.n_bytes, "runs beside it") for one in others]
    total = sum(n_bytes for _, n_bytes, _ in lines)
    told = [f"  {name:<11} {amount(size):>9}  {word}" for name, size, word in lines if size]
    return "\n".join(
        [
            f"`{found.preset.name}` does not fit: {amount(total)} are needed, {memory.owner} has "
            f"{amount(memory.usable)} for models (of {amount(memory.total)})",
            *told,
            _way_out(load, memory.usable - sum(one.n_bytes for one in others), others),
        ]
    )


def _way_out(load: Load, free: int, others: list[Tenant]) -> str:
    options = [settings(one, load) for one in nearest(load, free)]
    options += [f"mlx-stack down {one.name}" for one in others]
    if not options:
        return (
            "not even one slot of 1024 tokens would fit; take a smaller model (`mlx-stack plan "
            f"--recommend`), or say what memory there is in {VARIABLE}, such as 48GB"
        )
    return "what would help: " + ", or ".join(options)


def _taken(home: Home, state: State, memory: Memory) -> int:
    preset = read_json(home.preset_file(state.plan.name), Preset)
    if preset is not None:
        try:
            return need(candidate.of_preset(preset).load(memory.half_bytes)).total
        except (SetupError, BadRequest):
            pass
    try:
        pid = state.worker.pid if state.worker is not None else state.supervisor.pid
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _refuse_whole_windows(preset: Preset, load: Load) -> None:
    geometry = load.geometry
    if not preset.kv.swa_full or all(one.kind is not LayerKind.SLIDING for one in geometry.layers):
        return
    whole, capped = (
        geometry_.n_bytes(load.n_ctx) * load.n_slots / 2**20
        for geometry_ in (uncapped(geometry), geometry)
    )
    raise SetupError(
        f"kv.swa_full: keeping the sliding windows of `{preset.name}` whole would take "
        f"{whole:.0f} MiB of KV instead of {capped:.0f} MiB, and buys nothing here: saved and "
        "parked contexts carry checkpoints of their windows; remove kv.swa_full"
    )
