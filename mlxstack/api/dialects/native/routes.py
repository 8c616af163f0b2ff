"""Native routes: agents, KV exchange, prefix cache, model swap, status feed."""

from msgspec import structs

from mlxstack.api.dialects.llama_server.routes import DIALECT as LLAMA_SERVER
from mlxstack.api.dialects.native import agents, events, kv, model_swap, prefix_cache

DIALECT = structs.replace(
    LLAMA_SERVER,
    routes=(*events.ROUTES, *prefix_cache.ROUTES, *agents.ROUTES, *kv.ROUTES, *model_swap.ROUTES),
    prefixes=(),
)
