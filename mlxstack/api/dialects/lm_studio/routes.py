"""Routes of LM Studio's own API: the lists of models."""

import asyncio

from litestar import get
from litestar.params import FromPath
from msgspec.structs import replace

from mlxstack.api.dialects.lm_studio.response_schema import (
    Capabilities,
    InstanceConfig,
    LMStudioListedModel,
    LMStudioListing,
    LMStudioModel,
    LMStudioModels,
    LoadedInstance,
    quantization,
)
from mlxstack.api.dialects.ollama.models import parameter_count
from mlxstack.api.guards import PUBLIC
from mlxstack.api.request_fields import resolve_model
from mlxstack.api.run_generation import TheService
from mlxstack.core.preset import ServiceKind
from mlxstack.models.local_models import quantization_of
from mlxstack.service.service import Service


@get("/api/v0/models", opt=PUBLIC)
async def lm_studio_models(service: TheService) -> LMStudioModels:
    """List the one model of this service."""
    return LMStudioModels((await _model(service),))


@get("/api/v0/models/{name:path}", opt=PUBLIC)
async def lm_studio_model(service: TheService, name: FromPath[str]) -> LMStudioModel:
    """Model by name, which may contain slashes."""
    resolve_model(service, name.removeprefix("/"))
    return await _model(service)


@get("/api/v1/models", opt=PUBLIC)
async def listed_models(service: TheService) -> LMStudioListing:
    """List the one model of this service with its loaded instance."""
    facts = service.facts
    is_chat = service.preset.kind is ServiceKind.CHAT
    config = InstanceConfig(service.n_ctx, service.preset.slots.count)
    model = LMStudioListedModel(
        type="embedding",
        publisher=_publisher(service),
        key=service.name,
        display_name=service.name,
        quantization=quantization(await asyncio.to_thread(quantization_of, facts.path)),
        size_bytes=facts.n_bytes,
        params_string=parameter_count(facts.n_params),
        loaded_instances=(LoadedInstance(service.name, config),),
        max_context_length=facts.n_ctx_train or service.n_ctx,
    )
    if is_chat:
        model = replace(
            model,
            type="llm",
            architecture=facts.architecture,
            capabilities=_capabilities(service),
            description=None,
        )
    if service.is_unloaded:
        model = replace(model, loaded_instances=())
    return LMStudioListing((model,))


async def _model(service: Service) -> LMStudioModel:
    facts = service.facts
    is_chat = service.preset.kind is ServiceKind.CHAT
    has_tools = is_chat and _capabilities(service).trained_for_tool_use
    return LMStudioModel(
        id=service.name,
        type="llm" if is_chat else "embeddings",
        publisher=_publisher(service),
        arch=facts.architecture,
        quantization=await asyncio.to_thread(quantization_of, facts.path),
        max_context_length=facts.n_ctx_train,
        loaded_context_length=service.n_ctx,
        capabilities=("tool_use",) if has_tools else (),
        state="not-loaded" if service.is_unloaded else "loaded",
    )


def _capabilities(service: Service) -> Capabilities:
    template = service.template
    return Capabilities(template.accepts_images, template.caps["supports_tools"])


def _publisher(service: Service) -> str:
    """Owner of the repository; `local` for a model of a folder."""
    publisher, _, name = service.preset.model.id.rpartition("/")
    if publisher and name and "/" not in publisher:
        return publisher
    return "local"
