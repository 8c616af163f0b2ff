"""Routes of LM Studio's own API: the list of models."""

import asyncio

from litestar import get
from litestar.params import FromPath
from msgspec import Struct

from mlxstack.api.guards import PUBLIC
from mlxstack.api.request_fields import resolve_model
from mlxstack.api.run_generation import TheService
from mlxstack.core.preset import ServiceKind
from mlxstack.models.local_models import quantization_of
from mlxstack.service.service import Service


class LMStudioModel(Struct, frozen=True):
    """Model with its state and its contexts in tokens."""

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


@get("/api/v0/models", opt=PUBLIC)
async def lm_studio_models(service: TheService) -> LMStudioModels:
    """List the one model of this service."""
    return LMStudioModels((await _model(service),))


@get("/api/v0/models/{name:path}", opt=PUBLIC)
async def lm_studio_model(service: TheService, name: FromPath[str]) -> LMStudioModel:
    """Model by name, which may contain slashes."""
    resolve_model(service, name.removeprefix("/"))
    return await _model(service)


async def _model(service: Service) -> LMStudioModel:
    facts = service.facts
    is_chat = service.preset.kind is ServiceKind.CHAT
    has_tools = is_chat and service.template.caps["supports_tools"]
    publisher, _, name = service.preset.model.id.rpartition("/")
    return LMStudioModel(
        id=service.name,
        type="llm" if is_chat else "embeddings",
        publisher=publisher if publisher and name and "/" not in publisher else "local",
        arch=facts.architecture,
        quantization=await asyncio.to_thread(quantization_of, facts.path),
        max_context_length=facts.n_ctx_train,
        loaded_context_length=service.n_ctx,
        capabilities=("tool_use",) if has_tools else (),
        state="not-loaded" if service.is_unloaded else "loaded",
    )
