"""Health and properties of the service."""

import os
from contextlib import suppress
from typing import Any

from litestar import Response, get, head, post
from msgspec import to_builtins

from mlxstack import __version__
from mlxstack.api.dialects.llama_server.response_schema import params
from mlxstack.api.guards import EARLY, UNLOADED, is_unscoped
from mlxstack.api.run_generation import AnyRequest, TheService
from mlxstack.api.web_page import page_or
from mlxstack.core.errors import Loading, StackError, Unsupported
from mlxstack.core.image import MEDIA_MARKER
from mlxstack.host.command_buffers import buffer_limits
from mlxstack.service.service import Service, ServiceHealth


@get("/", opt=EARLY)
async def root(request: AnyRequest, service: TheService) -> Response[Any]:
    """Name, version and status; for a browser the web page."""
    status = service.health.value
    return page_or(request, {"name": "mlx-stack", "version": __version__, "status": status})


@head(["/", "/api/hello"], opt=EARLY)
async def probe() -> None:
    """Reachability probe of clients."""


@get(["/health", "/v1/health"], opt=EARLY)
async def health(service: TheService) -> dict[str, str]:
    """Health: 200 when requests are served now or after a load."""
    match service.health:
        case ServiceHealth.OK:
            return {"status": "ok"}
        case ServiceHealth.UNLOADED:
            return {"status": "unloaded", "model": service.name}
        case ServiceHealth.SWAPPING:
            return _swapping(service)
        case ServiceHealth.LOADING:
            raise Loading("Loading model")
        case ServiceHealth.STOPPING:
            raise Loading("the service is shutting down")
        case ServiceHealth.STALLED:
            raise Loading(f"{service.stall}; see the service log")
    raise Loading(f"{service.trouble}; see the service log")


@head(["/health", "/v1/health"], opt=EARLY)
async def probe_health(service: TheService) -> None:
    """Health by its status alone, as `wget --spider` asks for it."""
    await health.fn(service)


def _swapping(service: Service) -> dict[str, str]:
    change = service.change
    if change is None:
        return {"status": "swapping"}
    if trouble := change.trouble:
        raise Loading(trouble)
    return {"status": "swapping", "model": change.model, "step": change.step}


@get("/props", opt=UNLOADED)
async def props(request: AnyRequest, service: TheService) -> dict[str, Any]:
    """Properties as llama-server reports them, and the way this engine decodes."""
    snapshot = service.engine.snapshot()
    template = service.template
    facts = service.facts
    limit = service.preset.sampling.max_tokens or -1
    return {
        "default_generation_settings": {
            "params": params(service.default_sampling, limit),
            "n_ctx": service.n_ctx,
        },
        "total_slots": service.preset.slots.count,
        "model_alias": service.name,
        "model_ftype": f"KV {service.preset.kv.bits} bit",
        # Keys of some agents do not see a path of this machine.
        "model_path": facts.path if is_unscoped(request) else "",
        "modalities": {"vision": template.accepts_images, "video": False, "audio": False},
        "media_marker": MEDIA_MARKER,
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": service.preset.prefix_cache.metrics.enabled,
        "ui": False,
        "ui_settings": {},
        "chat_template": template.text,
        "chat_template_caps": template.caps,
        "template_notes": template.notes,
        # Names of tools may say what other agents do.
        "loose_schemas": _loose_schemas(service) if is_unscoped(request) else [],
        "is_base_model": template.is_base,
        "bos_token": template.bos,
        "eos_token": template.eos,
        "build_info": f"mlx-stack-{__version__}",
        "is_sleeping": service.is_unloaded,
        "cors_proxy_enabled": False,
        "architecture": facts.architecture,
        "n_ctx_train": facts.n_ctx_train,
        "is_batching": snapshot.is_batching,
        "why_not_batching": snapshot.why_not_batching,
        "exact": to_builtins(snapshot.exact),
        "draft_model": snapshot.draft_model,
        "prevents_sleep": service.sleep.is_held,
        "why_not_preventing_sleep": service.sleep.why_not or None,
        "warm_passes": snapshot.counters.n_warm_passes,
        "peer_troubles": [
            trouble
            for feature in service.features
            for trouble in feature.troubles()
            if is_unscoped(request)
        ],
        "mlx_active_bytes": snapshot.active_bytes,
        "kv_budget_bytes": snapshot.kv_budget_bytes,
        "mlx_cache_bytes": snapshot.cache_bytes,
        "max_batch_size": service.preset.batch.max_size,
        "max_entries": service.preset.prefix_cache.max_entries,
        "command_buffer_limits": buffer_limits(os.environ),
    }


def _loose_schemas(service: Service) -> list[str]:
    """Unenforced schema parts of recent tools; none without a model."""
    with suppress(StackError):
        return service.text_processor.constraints.all_unenforced
    return []


@post("/props", status_code=200)
async def set_props() -> Response[None]:
    """Refuse changes: properties come from the preset."""
    raise Unsupported("This server does not support changing global properties; edit the preset")
