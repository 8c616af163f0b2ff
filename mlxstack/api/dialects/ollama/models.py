"""Descriptions of the model in Ollama's fields."""

import asyncio
import time
from typing import Any

from mlxstack.api.dialects.ollama.response_schema import (
    OllamaDetails,
    OllamaLoadedModel,
    OllamaModel,
    OllamaModelInfo,
    rfc3339,
)
from mlxstack.core.preset import ServiceKind
from mlxstack.models.local_models import quantization_of
from mlxstack.service.calls.idle_unload import remaining_s
from mlxstack.service.service import Service

NEVER_S = 2**63 // 10**9
"""Seconds until expiry that mean never: the longest duration in nanoseconds."""


async def details(service: Service) -> OllamaDetails:
    """Family, size and quantization of the model, from its config.json."""
    facts = service.facts
    return OllamaDetails(
        parent_model="",
        format="safetensors",
        family=facts.architecture,
        families=(facts.architecture,),
        parameter_size=parameter_count(facts.n_params),
        quantization_level=await asyncio.to_thread(quantization_of, facts.path),
    )


def tagged_model(service: Service, details: OllamaDetails) -> OllamaModel:
    """Entry of the list of models."""
    modified_at = rfc3339(service.stats.started_at)
    return OllamaModel(**_entry(service, details), modified_at=modified_at)


def loaded_model(service: Service, details: OllamaDetails) -> OllamaLoadedModel:
    """Entry of the list of models in memory."""
    return OllamaLoadedModel(
        **_entry(service, details),
        expires_at=rfc3339(time.time() + min(remaining_s(service), NEVER_S)),
        size_vram=service.facts.n_bytes,
        context_length=service.n_ctx,
    )


def _entry(service: Service, details: OllamaDetails) -> dict[str, Any]:
    facts = service.facts
    named = {"name": service.name, "model": service.name}
    return {**named, "size": facts.n_bytes, "digest": facts.identity.key(), "details": details}


def model_info(service: Service, details: OllamaDetails) -> OllamaModelInfo:
    """Full description; the context length is that of a slot."""
    facts = service.facts
    family = facts.architecture
    return OllamaModelInfo(
        modelfile=f"FROM {service.name}\n",
        parameters=f"num_ctx {service.n_ctx}",
        template=service.template.text,
        details=details,
        model_info={
            "general.architecture": family,
            "general.basename": service.name,
            "general.parameter_count": facts.n_params,
            f"{family}.context_length": service.n_ctx,
            f"{family}.vocab_size": facts.n_vocab,
        },
        capabilities=capabilities(service),
        modified_at=rfc3339(service.stats.started_at),
    )


def capabilities(service: Service) -> tuple[str, ...]:
    """Abilities of the model in Ollama's words."""
    if service.preset.kind is ServiceKind.EMBEDDING:
        return ("embedding",)
    template = service.template
    return (
        "completion",
        *(("tools",) if template.caps["supports_tools"] else ()),
        *(("thinking",) if template.has_thoughts else ()),
        *(("vision",) if template.accepts_images else ()),
    )


def parameter_count(n: int) -> str:
    """Number of parameters as Ollama writes it."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= unit:
            return f"{n / unit:.1f}{letter}"
    return str(n)
