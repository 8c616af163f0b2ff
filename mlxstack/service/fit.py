"""Whether a model and its slots fit into the memory of this computer, before the old one leaves."""

import os

from msgspec.structs import replace

from mlxstack.core.errors import BadRequest, SetupError
from mlxstack.core.preset import Preset
from mlxstack.host.machine import amount
from mlxstack.host.memory import Memory, this_memory
from mlxstack.host.models import ModelFiles
from mlxstack.policy import architectures
from mlxstack.policy.capacity import Load, need
from mlxstack.policy.geometry import Geometry, quantized

SINGLE = 4


def refuse_if_too_big(preset: Preset, files: ModelFiles, weights: int) -> None:
    """Raises SetupError with the numbers. `weights` are bytes in memory.

    Of a model whose caches are unknown only the weights are counted.
    """
    memory = this_memory(os.environ)
    geometry = _geometry(preset, files, memory)
    wanted = weights
    if geometry is not None:
        slots = preset.slots
        load = Load(geometry, weights, 0, slots.count, slots.n_ctx, preset.pace.max_bite)
        wanted = need(load).total
    if wanted > memory.usable:
        raise SetupError(
            f"{preset.model.id} with {preset.slots.count} slots of {preset.slots.n_ctx} tokens "
            f"needs {amount(wanted)}, {memory.owner} has {amount(memory.usable)} for models; "
            "give it fewer or shorter slots, or choose a smaller model"
        )


def _geometry(preset: Preset, files: ModelFiles, memory: Memory) -> Geometry | None:
    try:
        found = architectures.geometry(files.config)
    except BadRequest:
        return None
    if memory.half_bytes == SINGLE:
        found = replace(found, element_bytes=SINGLE)
    kv = preset.kv
    bits = 16 if kv.quantize_from >= preset.slots.n_ctx else kv.bits
    return quantized(found, bits, kv.group_size)
