"""Litestar application over one service: the routes of all API dialects."""

from itertools import chain
from typing import Any

from litestar import Litestar, Request, Response
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin, YamlRenderPlugin
from litestar.openapi.spec import Components, SecurityScheme

from mlxstack import __version__
from mlxstack.api import errors, guards
from mlxstack.api.dialects.llama_server.metrics import metrics_route
from mlxstack.api.disconnect import is_disconnect
from mlxstack.api.host_rules import host_guard
from mlxstack.api.openapi import with_openapi
from mlxstack.api.registry import DIALECTS, dialect_of
from mlxstack.api.request_body import JSONRequest
from mlxstack.api.request_fields import names
from mlxstack.api.run_generation import loaded_guard, provided, reader_guard
from mlxstack.api.web_page import PAGE_ROUTES
from mlxstack.service.service import Service

# nginx's status for a client that did not wait.
CLIENT_LEFT = 499


def create_app(service: Service) -> Litestar:
    """Application with all routes; its owner starts and stops the service."""
    server = service.preset.server
    routes = chain(*(dialect.routes for dialect in DIALECTS), [metrics_route(service)], PAGE_ROUTES)
    return Litestar(
        route_handlers=[with_openapi(route) for route in routes],
        dependencies={"service": provided(service)},
        guards=[
            host_guard(server),
            guards.key_guard(server, lambda: (*names(service), service.preset.name)),
            loaded_guard(service),
            reader_guard(service),
        ],
        exception_handlers={Exception: _answer},
        before_send=[guards.name_response],
        request_class=JSONRequest,
        request_max_body_size=server.max_body_bytes,
        openapi_config=_openapi(),
        logging_config=None,
    )


def _answer(request: Request[Any, Any, Any], problem: Exception) -> Response[Any]:
    if is_disconnect(problem):
        return Response(None, status_code=CLIENT_LEFT)
    path = request.scope["path"]
    n_body = request.scope["state"].get("n_body", 0)
    error = errors.to_stack_error(problem, request.method, path, n_body)
    return dialect_of(path).error_response(error, guards.request_id(request.scope))


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
