"""Response bodies of LM Studio's API, versions 0 and 1."""

import re

from msgspec import UNSET, Struct, UnsetType


class LMStudioModel(Struct, frozen=True):
    """Model of version 0 with its state and its contexts in tokens."""

    id: str
    type: str
    publisher: str
    arch: str
    quantization: str
    max_context_length: int
    loaded_context_length: int
    capabilities: tuple[str, ...]
    state: str
    compatibility_type: str = "mlx"
    object: str = "model"


class LMStudioModels(Struct, frozen=True):
    data: tuple[LMStudioModel, ...]
    object: str = "list"


class Quantization(Struct, frozen=True):
    name: str
    bits_per_weight: int | None


class InstanceConfig(Struct, frozen=True):
    """Tokens of one context, and the number of contexts."""

    context_length: int
    parallel: int


class LoadedInstance(Struct, frozen=True):
    id: str
    config: InstanceConfig


class Capabilities(Struct, frozen=True):
    vision: bool
    trained_for_tool_use: bool


class LMStudioListedModel(Struct, frozen=True, kw_only=True):
    """Model of version 1; capabilities are those of a chat model."""

    type: str
    publisher: str
    key: str
    display_name: str
    architecture: str | UnsetType = UNSET
    quantization: Quantization | None
    size_bytes: int
    params_string: str | None
    loaded_instances: tuple[LoadedInstance, ...]
    max_context_length: int
    format: str = "mlx"
    capabilities: Capabilities | UnsetType = UNSET
    description: str | UnsetType | None = UNSET


class LMStudioListing(Struct, frozen=True):
    """Answer of GET /api/v1/models."""

    models: tuple[LMStudioListedModel, ...]


def quantization(name: str) -> Quantization | None:
    """Quantization by its name, such as "4 bit"."""
    bits = re.search(r"\d+", name)
    if name:
        return Quantization(name, int(bits[0]) if bits else None)
    return None
