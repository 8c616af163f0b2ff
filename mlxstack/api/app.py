"""Wires the doors: one Litestar application over one service."""

from typing import Any

from litestar import Litestar, Request, Response
from litestar.di import Provide
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin, YamlRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme

from mlxstack import __version__
from mlxstack.api import errors, guards
from mlxstack.api.dialects.anthropic import routes as anthropic
from mlxstack.api.dialects.llama_server import completion, health_and_props, slots, tokenize
from mlxstack.api.dialects.llama_server.metrics import metrics_route
from mlxstack.api.dialects.native import agent_turns, agents, events, model_swap, prefix_cache
from mlxstack.api.dialects.openai_chat import routes
from mlxstack.api.dialects.openai_completions import routes as openai_completions_routes
from mlxstack.api.dialects.openai_embeddings import routes as openai_embeddings_routes
from mlxstack.api.dialects.openai_models import routes as openai_models_routes
from mlxstack.api.dialects.openai_responses import routes as responses
from mlxstack.api.disconnect import has_left
from mlxstack.api.openapi import with_openapi
from mlxstack.api.request_id import name_response
from mlxstack.service.service import Service

ROUTES = (
    *routes.ROUTES,
    *openai_completions_routes.ROUTES,
    *responses.ROUTES,
    *openai_models_routes.ROUTES,
    *openai_embeddings_routes.ROUTES,
    *anthropic.ROUTES,
    *health_and_props.ROUTES,
    *events.ROUTES,
    *slots.ROUTES,
    *prefix_cache.ROUTES,
    *agents.ROUTES,
    *agent_turns.ROUTES,
    *model_swap.ROUTES,
    *tokenize.ROUTES,
    *completion.ROUTES,
)

# nginx's status for a client that did not wait; nobody reads it.
CLIENT_LEFT = 499


def create_app(service: Service) -> Litestar:
    """Every door of the service. The service itself is started and stopped by its owner."""
    server = service.preset.server
    return Litestar(
        route_handlers=[with_openapi(route) for route in (*ROUTES, metrics_route(service))],
        dependencies={"service": Provide(lambda: service, sync_to_thread=False)},
        guards=[
            guards.host_guard(server),
            guards.key_guard(server),
            guards.loaded_guard(service),
        ],
        exception_handlers={Exception: _answer},
        before_send=[name_response],
        request_max_body_size=server.max_body_bytes,
        cors_config=guards.cors(server),
        openapi_config=_openapi(),
        logging_config=None,
    )


def _answer(request: Request[Any, Any, Any], problem: Exception) -> Response[Any]:
    if has_left(problem):
        return Response(None, status_code=CLIENT_LEFT)
    return errors.exception_handler(request, problem)


def _openapi() -> OpenAPIConfig:
    return OpenAPIConfig(
        title="mlx-stack",
        version=__version__,
        # Pages that show it would load scripts of other sites into this origin.
        render_plugins=[
            JsonRenderPlugin(path="/openapi.json"),
            YamlRenderPlugin(path=["/openapi.yaml", "/openapi.yml"]),
        ],
        components=Components(
            security_schemes={"ApiKey": SecurityScheme(type="http", scheme="bearer")}
        ),
    )
