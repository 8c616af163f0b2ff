"""Protocol facts of the API dialects: paths, errors, heartbeats. No routes, and no service."""

from collections.abc import Iterable

from msgspec import structs

from mlxstack.api.dialect import Dialect
from mlxstack.api.dialects.anthropic import response_schema as anthropic
from mlxstack.api.dialects.anthropic.stream import HEARTBEAT as PING
from mlxstack.api.dialects.llama_server import response_schema as llama_server
from mlxstack.api.dialects.ollama import response_schema as ollama
from mlxstack.api.dialects.ollama.stream import HEARTBEAT as SPACE
from mlxstack.api.dialects.openai_chat import response_schema as openai_chat
from mlxstack.api.dialects.openai_responses import response_schema as openai_responses
from mlxstack.api.streaming import JSON_LINES, KEEPALIVE
from mlxstack.core.errors import Busy, OutOfMemory, Unsupported

OPENAI = Dialect(
    prefixes=("/v1/", "/chat/completions", "/models", "/api/v0/"),
    error_body=openai_chat.error_body,
    heartbeat=KEEPALIVE,
)
RESPONSES = structs.replace(
    OPENAI,
    prefixes=("/v1/responses", "/responses", "/v1/batch/responses"),
    heartbeat=openai_responses.HEARTBEAT,
)
ANTHROPIC = Dialect(
    prefixes=("/v1/messages", "/v1/batch/messages"),
    error_body=anthropic.error_body,
    heartbeat=PING,
    error_event="error",
    statuses={Unsupported: 400, Busy: 529, OutOfMemory: 529},
    prefers_x_api_key=True,
)
LLAMA_SERVER = Dialect(
    prefixes=("",),
    error_body=llama_server.error_body,
    heartbeat=KEEPALIVE,
)
OLLAMA = Dialect(
    prefixes=("/api/",),
    error_body=ollama.error_body,
    heartbeat=SPACE,
    stream_type=JSON_LINES,
    streaming_paths=frozenset({"/api/chat", "/api/generate", "/api/pull"}),
)

PROTOCOLS = (OPENAI, RESPONSES, ANTHROPIC, LLAMA_SERVER, OLLAMA)


def dialect_of(path: str, dialects: Iterable[Dialect] = PROTOCOLS) -> Dialect:
    """Dialect of a request by the longest prefix of its path."""
    prefixes = {
        prefix: dialect
        for dialect in dialects
        for prefix in dialect.prefixes
        if path.startswith(prefix)
    }
    return prefixes[max(prefixes, key=len)]
