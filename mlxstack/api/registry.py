"""API dialects of this service with their routes."""

from types import ModuleType

from litestar.handlers import HTTPRouteHandler
from msgspec.structs import replace

from mlxstack.api import protocols
from mlxstack.api.dialects.anthropic import routes as anthropic
from mlxstack.api.dialects.llama_server import health_and_props, slots, tokenize
from mlxstack.api.dialects.llama_server import routes as llama_server
from mlxstack.api.dialects.lm_studio import routes as lm_studio
from mlxstack.api.dialects.native import agents, events, model_swap, prefix_cache
from mlxstack.api.dialects.ollama import routes as ollama
from mlxstack.api.dialects.openai_completions import routes as openai_completions
from mlxstack.api.dialects.openai_embeddings import routes as openai_embeddings
from mlxstack.api.dialects.openai_models import routes as openai_models
from mlxstack.api.dialects.openai_responses import chat_routes as openai_chat
from mlxstack.api.dialects.openai_responses import routes as openai_responses
from mlxstack.api.protocols import Dialect
from mlxstack.features.heads import api as client_heads
from mlxstack.features.receipts import api as receipts
from mlxstack.features.remote_kv import api as kv
from mlxstack.features.usage import api as usage


def _routed(dialect: Dialect, *modules: ModuleType) -> Dialect:
    """Dialect with the routes that modules define."""
    members = (member for module in modules for member in vars(module).values())
    routes = tuple(member for member in members if isinstance(member, HTTPRouteHandler))
    return replace(dialect, routes=routes)


NATIVE = (agents, client_heads, events, kv, model_swap, prefix_cache, receipts, usage)
DIALECTS: tuple[Dialect, ...] = (
    _routed(
        protocols.OPENAI,
        openai_chat,
        openai_completions,
        openai_embeddings,
        openai_models,
        lm_studio,
    ),
    protocols.BARE_CHAT,
    _routed(protocols.RESPONSES, openai_responses),
    _routed(protocols.ANTHROPIC, anthropic),
    _routed(protocols.LLAMA_SERVER, llama_server, health_and_props, slots, tokenize, *NATIVE),
    _routed(protocols.OLLAMA, ollama),
)


def dialect_of(path: str) -> Dialect:
    """Dialect of a request by its path."""
    return protocols.dialect_of(path, DIALECTS)
