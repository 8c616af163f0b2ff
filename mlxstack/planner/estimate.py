"""Estimate for `plan` and `spec`: KV per layer kind, sum, fit."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.errors import Unsupported
from mlxstack.core.preset import ServiceKind
from mlxstack.host.hardware import MemoryBudget
from mlxstack.planner.candidate import Candidate
from mlxstack.planner.fit import over_budget, settings
from mlxstack.planner.memory_room import claim
from mlxstack.policy.memory.capacity import (
    Geometry,
    Layer,
    ServiceLoad,
    disk_bytes,
    fits,
    kv_budget,
    max_agents,
    max_ctx,
    need,
    quantized,
)
from mlxstack.policy.memory.capacity_advice import nearest
from mlxstack.policy.memory.memory_shares import MemoryClaim, kv_budgets

CONTEXTS = tuple(4096 * 2**n for n in range(6))
SLOTS = (1, 2, 3, 4, 6, 8, 10, 16)
BITS = (16, 8, 4)
DISK_TOKENS = 50_000
SCREENSHOT = 1920, 1080
"""Width and height in pixels."""


class KindRow(Struct, frozen=True):
    """Layers of one kind: count, and bytes per token or in all."""

    kind: str
    layers: tuple[int, ...]
    heads: int
    k_dim: int
    v_dim: int
    window: int
    token_bytes: int
    state_bytes: int


class Spec(Struct, frozen=True):
    """Geometry of a model's caches; bytes at 16-bit KV."""

    model: str
    architecture: str
    config: str
    is_excerpt: bool
    n_trained: int
    n_layers: int
    kinds: tuple[KindRow, ...]
    growth_bytes: int
    window_bytes: int
    kv_bytes_4k: int
    weights_bytes: int
    weights_from: str
    tower_bytes: int = 0
    """Part of the weights: the vision tower."""
    n_screenshot: int = 0
    """Tokens of a screenshot; 0 without a tower."""
    why_no_images: str = ""
    """Why a tower serves no images."""
    head_bytes: int = 0
    """Part of the weights: the MTP head."""


class InMemory(Struct, frozen=True):
    """Weights and unquantized KV of a token in a machine's memory.

    A CPU widens 16 bits to 32.
    """

    weights_bytes: int
    growth_bytes: int
    bits: int


class PrecisionFit(Struct, frozen=True):
    """KV precision with bytes of a context, and agents that fit."""

    bits: int
    kv_bytes: int
    n_agents: int


class ContextRow(Struct, frozen=True):
    """One length of context; `disk_bytes` is one saved agent."""

    n_ctx: int
    precisions: tuple[PrecisionFit, ...]
    disk_bytes: int


class CapacityCell(Struct, frozen=True):
    """Bytes of `n_slots` slots with `n_ctx` tokens each."""

    n_slots: int
    n_ctx: int
    n_bytes: int
    fits: bool


class Fit(Struct, frozen=True):
    """Fit of slots x context, or settings that do fit."""

    n_slots: int
    n_ctx: int
    bits: int
    n_bytes: int
    kv_bytes: int
    fits: bool
    over_budget: str
    """By how much their KV exceeds the engine's budget; "" where it does not."""
    nearest: tuple[str, ...]
    """Settings that would fit."""
    max_ctx: int
    max_agents: int


class Forecast(Struct, frozen=True):
    """Forecast of a preset.

    An embedding model keeps no KV: its budget and disk are 0, and it has no tables.
    """

    preset: str
    kind: ServiceKind
    spec: Spec
    here: InMemory
    """The model in `memory`."""
    memory: MemoryBudget
    workspace_bytes: int
    kv_budget_bytes: int
    """Bytes for KV by `prefix_cache.memory_budget_pct`."""
    wanted: Fit
    disk_bytes_50k: int
    """A saved agent of 50,000 tokens."""
    contexts: tuple[ContextRow, ...]
    matrix: tuple[CapacityCell, ...]


def spec_of(candidate: Candidate) -> Spec:
    """The geometry and weights of a model. Raises Unsupported."""
    geometry = candidate.geometry()
    return Spec(
        model=candidate.preset.model.id,
        architecture=candidate.architecture,
        config=str(candidate.files.source),
        is_excerpt=candidate.files.is_excerpt,
        n_trained=candidate.n_trained,
        n_layers=len(geometry.layers),
        kinds=tuple(_kinds(geometry)),
        growth_bytes=geometry.growth,
        window_bytes=geometry.state_bytes(1 << 30),
        kv_bytes_4k=geometry.n_bytes(4096),
        weights_bytes=candidate.weights.n_bytes(),
        weights_from="measured" if candidate.is_measured else "estimated",
        tower_bytes=candidate.vision.tower.n_bytes(),
        n_screenshot=candidate.vision.n_tokens(*SCREENSHOT),
        why_no_images=candidate.vision.why_not,
        head_bytes=candidate.head.n_bytes(),
    )


def forecast(
    candidate: Candidate,
    memory: MemoryBudget,
    load: ServiceLoad,
    contexts: Sequence[int],
    claims: Sequence[MemoryClaim] = (),
) -> Forecast:
    """The forecast for `wanted`, which is `candidate.load` with other slots or context.

    `others` run beside it.
    """
    keeps_kv = candidate.preset.kind is not ServiceKind.EMBEDDING
    contexts = contexts if keeps_kv else ()
    return Forecast(
        preset=candidate.preset.name,
        kind=candidate.preset.kind,
        spec=spec_of(candidate),
        here=_in_memory(candidate, memory.half_bytes),
        memory=memory,
        workspace_bytes=load.workspace,
        kv_budget_bytes=_kv_budget(load, memory.usable, claims) if keeps_kv else 0,
        wanted=fit(load, memory.usable),
        disk_bytes_50k=disk_bytes(load.geometry, DISK_TOKENS) if keeps_kv else 0,
        contexts=tuple(_row(load, memory.usable, n_ctx) for n_ctx in contexts),
        matrix=tuple(
            _cell(replace(load, n_slots=n, n_ctx=n_ctx), memory.usable)
            for n in SLOTS
            for n_ctx in contexts
        ),
    )


def _in_memory(candidate: Candidate, half_bytes: int) -> InMemory:
    geometry = candidate.geometry(half_bytes)
    weights = candidate.weights.n_bytes(half_bytes)
    return InMemory(weights, geometry.growth, 8 * geometry.element_bytes)


def fit(load: ServiceLoad, usable: int) -> Fit:
    """Fit of a load, or advice to make it fit."""
    parts = need(load)
    is_fitting = fits(load, usable)
    remedies: list[str] = []
    if not is_fitting:
        remedies = [settings(option, load) for option in nearest(load, usable)]
    return Fit(
        n_slots=load.n_slots,
        n_ctx=load.n_ctx,
        bits=load.geometry.bits,
        n_bytes=parts.total,
        kv_bytes=parts.kv,
        fits=is_fitting,
        over_budget=over_budget(load),
        nearest=tuple(remedies),
        max_ctx=max_ctx(load, usable),
        max_agents=max_agents(load, usable),
    )


def _kv_budget(load: ServiceLoad, usable: int, claims: Sequence[MemoryClaim]) -> int:
    left = max(0, kv_budget(usable, load.weights, load.workspace))
    return min(left, kv_budgets((claim(load), *claims), usable)[""])


def _kinds(geometry: Geometry) -> list[KindRow]:
    groups: dict[Layer, list[int]] = {}
    for number, layer in enumerate(geometry.layers):
        groups.setdefault(layer, []).append(number)
    return [_kind(geometry, layer, numbers) for layer, numbers in groups.items()]


def _kind(geometry: Geometry, layer: Layer, numbers: list[int]) -> KindRow:
    alone = replace(geometry, layers=(layer,))
    return KindRow(
        kind=layer.kind.value,
        layers=tuple(numbers),
        heads=layer.k_heads,
        k_dim=layer.k_dim,
        v_dim=layer.v_dim,
        window=layer.window,
        token_bytes=geometry.token_bytes(layer),
        state_bytes=alone.state_bytes(1 << 30) * len(numbers),
    )


def _row(load: ServiceLoad, usable: int, n_ctx: int) -> ContextRow:
    return ContextRow(
        n_ctx=n_ctx,
        precisions=tuple(_precisions(replace(load, n_ctx=n_ctx), usable)),
        disk_bytes=disk_bytes(load.geometry, n_ctx),
    )


def _precisions(load: ServiceLoad, usable: int) -> list[PrecisionFit]:
    rows: list[PrecisionFit] = []
    for bits in BITS:
        try:
            geometry = quantized(load.geometry, bits, load.geometry.group_size)
        except Unsupported:
            break
        if rows and geometry.n_bytes(load.n_ctx) == rows[0].kv_bytes:
            break  # Latent KV stays as it is.
        option = replace(load, geometry=geometry)
        rows.append(PrecisionFit(bits, geometry.n_bytes(load.n_ctx), max_agents(option, usable)))
    return rows


def _cell(load: ServiceLoad, usable: int) -> CapacityCell:
    return CapacityCell(load.n_slots, load.n_ctx, need(load).total, fits(load, usable))
