"""The page docs/api.md, drawn from the routes of the service."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from litestar.handlers import HTTPRouteHandler

from mlxstack.api.app import create_app
from mlxstack.core.preset import ServerSpec
from tests.api.running import standing
from tests.service.standin import FACTS

ABOUT = Path(__file__).with_name("api_about.md").read_text(encoding="utf-8")

CALLS = Path(__file__).with_name("api_calls.md").read_text(encoding="utf-8")

GENERATING = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/completion")
DOORS = (
    (("mlxstack.api.dialects.openai",), "OpenAI"),
    (("mlxstack.api.dialects.anthropic.",), "Anthropic"),
    (("mlxstack.api.dialects.ollama.", "mlxstack.api.dialects.lm_studio."), "Ollama, LM Studio"),
    (
        (
            "mlxstack.api.dialects.llama_server.",
            "mlxstack.api.dialects.native.",
            "mlxstack.features.",
        ),
        "llama-server, agents, cache",
    ),
)


def page() -> str:
    """The whole page."""
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    app = create_app(service)
    schema = app.openapi_schema.to_schema()
    handlers = [handler for route in app.routes for handler in getattr(route, "route_handlers", ())]
    common = _common(schema)
    doors = (_door(*door, handlers, schema, common) for door in DOORS)
    fields = ", ".join(f"`{field}`" for field in common)
    return "\n".join([ABOUT, *doors, f"## Common fields\n\n{fields}\n", CALLS])


def _common(schema: dict[str, Any]) -> list[str]:
    """What every body takes that asks for an answer."""
    bodies = [_fields(_operation(schema, "POST", path), schema) for path in GENERATING]
    return [field for field in bodies[0] if all(field in body for body in bodies)]


def _door(
    packages: tuple[str, ...],
    title: str,
    handlers: list[Any],
    schema: dict[str, Any],
    common: list[str],
) -> str:
    """One line for all routes that do the same."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for handler in handlers:
        if handler.fn.__module__.startswith(packages):
            for path, *row in _rows(handler, schema, common):
                paths = lines.setdefault((row[0], row[1], row[2]), [])
                paths.extend([path] if path not in paths else [])
    rows = [
        f"| {method} {', '.join(f'`{path}`' for path in sorted(paths))} | {description} | {takes} |"
        for (method, description, takes), paths in sorted(
            lines.items(), key=lambda line: (sorted(line[1]), line[0])
        )
    ]
    return "\n".join(
        [f"## {title}", "", "| route | what it does | takes |", "|---|---|---|", *rows, ""]
    )


def _rows(
    handler: HTTPRouteHandler, schema: dict[str, Any], common: list[str]
) -> Iterator[tuple[str, str, str, str]]:
    description = inspect.cleandoc(handler.fn.__doc__ or "").partition("\n\n")[0]
    description = description.replace("\n", " ").replace("|", "\\|")
    for path in handler.paths:
        shown_path = path.replace(":str", "").replace(":int", "").replace(":path", "")
        for method in sorted(handler.http_methods - {"OPTIONS"}):
            taken = _taken(_operation(schema, method, shown_path), schema, common)
            yield shown_path, method, description, ", ".join(taken)


def _taken(operation: dict[str, Any], schema: dict[str, Any], common: list[str]) -> Iterator[str]:
    """The query's parameters and the body's fields; required ones are bold."""
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "query":
            yield f"`?{parameter['name']}`"
    fields = _fields(operation, schema)
    if fields and set(common) <= set(fields):
        yield "the [common fields](#common-fields)"
        fields = {name: needed for name, needed in fields.items() if name not in common}
    for name, is_needed in fields.items():
        yield f"**`{name}`**" if is_needed else f"`{name}`"


def _operation(schema: dict[str, Any], method: str, path: str) -> dict[str, Any]:
    operation: dict[str, Any] = schema["paths"].get(path, {}).get(method.lower(), {})
    return operation


def _fields(operation: dict[str, Any], schema: dict[str, Any]) -> dict[str, bool]:
    """The body's fields, and whether they are required."""
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    name = body.get("schema", {}).get("$ref", "").rpartition("/")[2]
    shape = schema["components"]["schemas"].get(name, {})
    return {field: field in shape.get("required", ()) for field in shape.get("properties", ())}
