"""How many agents with how much context fit into a memory, before anything is loaded."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.policy.geometry import Geometry
from mlxstack.policy.records import CUT

MARGIN_BYTES = 64 * 1024 * 1024
"""Tokenizer, compiled kernels, and what else a process holds beside the model."""

HEADER_BYTES = 4096
"""Header and padding of one stored file."""


class Load(Struct, frozen=True):
    """What a service wants to hold: bytes of `weights` and `workspace`, slots, tokens per slot.

    `bite` is the longest piece of prompt prefilled at once; windows are larger while it runs.
    """

    geometry: Geometry
    weights: int
    workspace: int = 0
    n_slots: int = 1
    n_ctx: int = 4096
    bite: int = 512


class Need(Struct, frozen=True):
    """Bytes by cause. `kv_full` grows with the context, `kv_state` has an upper bound."""

    weights: int
    kv_full: int
    kv_state: int
    workspace: int
    margin: int = MARGIN_BYTES

    @property
    def total(self) -> int:
        """All bytes together."""
        return self.weights + self.kv_full + self.kv_state + self.workspace + self.margin


class Row(Struct, frozen=True):
    """One line of the table: KV of one context of `n_ctx` tokens, and what of it fits.

    `n_agents` are live contexts beside each other, `disk` is one saved agent.
    """

    n_ctx: int
    kv: int
    n_agents: int
    disk: int


def need(load: Load) -> Need:
    """The most bytes this load can take: all slots full, one of them in prefill."""
    settled = load.geometry.peak_state_bytes(load.n_ctx, 1)
    in_prefill = load.geometry.peak_state_bytes(load.n_ctx, load.bite)
    return Need(
        weights=load.weights,
        kv_full=load.geometry.peak_full_bytes(load.n_ctx) * load.n_slots,
        kv_state=settled * (load.n_slots - 1) + in_prefill,
        workspace=load.workspace,
    )


def kv_budget(limit: int, weights: int, workspace: int) -> int:
    """Bytes of `limit` that are left for KV beside weights and workspace; may be negative."""
    return limit - weights - workspace - MARGIN_BYTES


def fits(load: Load, memory: int) -> bool:
    """Whether `memory` usable bytes hold this load without swapping."""
    return need(load).total <= memory


def max_agents(load: Load, memory: int) -> int:
    """How many slots of `load.n_ctx` tokens fit, 0 if none. `load.n_slots` is ignored."""
    first = need(replace(load, n_slots=1)).total
    each = need(replace(load, n_slots=2)).total - first
    if first > memory:
        return 0
    return 1 + (memory - first) // each if each else 1


def max_ctx(load: Load, memory: int) -> int:
    """The most tokens per slot that fit `load.n_slots` slots, 0 if none; binary search."""
    low, high = 0, 1 << 24
    while low < high:
        middle = (low + high + 1) // 2
        if fits(replace(load, n_ctx=middle), memory):
            low = middle
        else:
            high = middle - 1
    return low


def disk_bytes(geometry: Geometry, n_tokens: int, n_checkpoints: int = 1) -> int:
    """One saved agent: segments once, and the states at its checkpoints."""
    if n_tokens <= 0:
        return 0
    checkpoints = 0 if geometry.is_sliceable else n_checkpoints
    n_files = -(-n_tokens // CUT) + checkpoints
    states = geometry.state_bytes(n_tokens) * checkpoints
    return geometry.full_bytes(n_tokens) + states + n_files * HEADER_BYTES


def table(load: Load, memory: int, contexts: Sequence[int]) -> tuple[Row, ...]:
    """One row per context length, in the order given."""
    return tuple(
        Row(
            n_ctx=n_ctx,
            kv=load.geometry.n_bytes(n_ctx),
            n_agents=max_agents(replace(load, n_ctx=n_ctx), memory),
            disk=disk_bytes(load.geometry, n_ctx),
        )
        for n_ctx in contexts
    )
