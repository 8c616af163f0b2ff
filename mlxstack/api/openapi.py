"""OpenAPI descriptions that handlers do not carry: streams and errors."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from litestar.handlers import HTTPRouteHandler
from litestar.openapi import ResponseSpec
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIResponse, OpenAPIType, Operation, Schema

from mlxstack.api.streaming import EVENT_STREAM, JSON_LINES

EITHER = "The whole answer; with `stream: true`, server-sent events instead."
LINES = "The whole answer with `stream: false`; by default, lines of JSON."

TEXT = Schema(type=OpenAPIType.STRING)
EVENT = Schema(type=OpenAPIType.OBJECT, required=["data"], properties={"event": TEXT, "data": TEXT})
# Fields that the envelopes of the dialects share; Ollama's error is a text.
DESCRIBED = Schema(
    type=OpenAPIType.OBJECT,
    required=["message", "type"],
    properties={"message": TEXT, "type": TEXT},
)
PROBLEM = Schema(
    type=OpenAPIType.OBJECT,
    required=["error"],
    properties={"error": Schema(one_of=[DESCRIBED, TEXT])},
)


STREAMS = {
    EITHER: {EVENT_STREAM: OpenAPIMediaType(schema=EVENT)},
    LINES: {JSON_LINES: OpenAPIMediaType()},
}
"""Contents beside the whole answer, by the description of both."""


@dataclass
class ResponseDescription(Operation):
    """Operation with its errors as they are sent, and with its stream."""

    def __post_init__(self) -> None:
        """Correct Litestar's assumptions."""
        responses = self.responses or {}
        problem = {"application/json": OpenAPIMediaType(schema=PROBLEM)}
        for status in ("400", "default"):
            responses[status] = OpenAPIResponse(
                description="What went wrong, in the words of the dialect", content=problem
            )
        whole = responses.get("200")
        if isinstance(whole, OpenAPIResponse) and whole.description in STREAMS and whole.content:
            whole.content |= STREAMS[whole.description]
        self.responses = responses


def response_spec(whole: Any, description: str = EITHER) -> dict[int, ResponseSpec]:
    """Shape of the whole response; a stream carries its pieces or lines."""
    spec = ResponseSpec(data_container=whole, description=description, generate_examples=False)
    return {200: spec}


lines_spec = partial(response_spec, description=LINES)


def with_openapi(handler: HTTPRouteHandler) -> HTTPRouteHandler:
    """Set the operation class of a handler."""
    handler.operation_class = ResponseDescription
    return handler
