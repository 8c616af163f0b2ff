"""Native routes: agents, KV exchange, prefix cache, model swap, status feed."""

from msgspec import structs

from mlxstack.api.dialects.llama_server.routes import DIALECT as LLAMA_SERVER
from mlxstack.api.dialects.native import agents, events, kv, model_swap, prefix_cache
from mlxstack.api.protocols import routes_of

DIALECT = structs.replace(
    LLAMA_SERVER, routes=routes_of(events, prefix_cache, agents, kv, model_swap), prefixes=()
)
