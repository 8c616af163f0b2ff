"""The page docs/api.md, drawn from the routes of the service."""

import inspect
from collections.abc import Iterator
from typing import Any

from litestar.handlers import HTTPRouteHandler

from mlxstack.api.app import create_app
from mlxstack.core.preset import ServerSpec
from tests.api.running import standing
from tests.service.standin import FACTS

ABOUT = """\
# HTTP API

Every route of the service, drawn by `make docs` (`python -m tests.pages`) from the routes
themselves. The running service describes them in full at `/schema/openapi.json` and
`/schema/openapi.yaml`. What each field means is what it means for the OpenAI, the Anthropic and the
llama-server API; unknown fields are ignored. A key goes where your client puts it:
`Authorization: Bearer KEY` or `x-api-key: KEY`.

Errors come in the envelope of the API dialect of the path, with a sentence that says what, why
and what to do; 503 and 529 carry `Retry-After`.

Clients of Ollama work with the address of the service as their host (`OLLAMA_HOST`). Streams are
lines of JSON; `options.num_ctx` and other options of Ollama's runtime are ignored, since the preset
says them. A tag `:latest` is ignored. `/api/pull` confirms a model that is on this machine and
downloads nothing.

LM Studio's lists of models are served in both versions, its other paths are not. Responses have the
fields of Open Responses. Anthropic's threads are refused by the code with which its SDKs go on
without one: [decision 14](decisions/0014-what-is-served-of-other-apis.md).

```bash
curl -s localhost:7109/api/chat \\
  -d '{"model": "demo", "messages": [{"role": "user", "content": "hello"}]}'
curl -s localhost:7109/api/tags
```
"""

CALLS = """\
## Calls in streams

The name of a call is sent as soon as the call is certain, then its arguments as they are sampled:
JSON, whatever the format of the model. The sum of the pieces is, byte for byte, what a whole
response has.

* Chat: the first delta of `tool_calls[i]` has name and `id`, the next ones have
  `function.arguments`.
* Messages: `content_block_start`, then `input_json_delta`, always fine-grained;
  `eager_input_streaming` and the beta header are accepted.
* Responses: `response.output_item.added`, then `response.function_call_arguments.delta`; the text
  of a custom tool comes in `response.custom_tool_call_input.delta`.
* Ollama: whole calls, one line each, since its clients take whole objects.

A call is certain when it has the name of an offered tool, its `id` where the format writes one in
the JSON of the call, and its arguments have begun behind the mark that opens a call (for a tagged
format, the first argument). Until then nothing is sent. A call inside of an open thought, of a
tool that is not offered, or of a format that only a parser of mlx-lm reads is sent when it is
complete, and so are numbers, and values that may be text or something else.

Nothing that was sent is taken back. Arguments that then break are completed, for a whole response
too: the rest of the call continues the text that was open (a quote in the middle of a text
belongs to it), or the object ends before the value that makes no sense. The first value of a key
counts. A call that is malformed before its arguments begin is text.

A call that `max_tokens` cuts has the arguments sampled so far: `finish_reason` is `length`,
`stop_reason` `max_tokens`, the status of the item `incomplete`. As text, they are the beginning
of an object; `input` of a whole message is that object, closed. Ollama leaves such a call out.
Log probabilities of the tokens of a call come with its pieces.
"""

GENERATING = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/completion")
DOORS = (
    (("mlxstack.api.dialects.openai",), "OpenAI"),
    (("mlxstack.api.dialects.anthropic.",), "Anthropic"),
    (("mlxstack.api.dialects.ollama.", "mlxstack.api.dialects.lm_studio."), "Ollama, LM Studio"),
    (
        ("mlxstack.api.dialects.llama_server.", "mlxstack.api.dialects.native."),
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
