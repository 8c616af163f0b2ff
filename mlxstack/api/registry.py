"""API dialects of this service, one line each."""

from mlxstack.api import protocols
from mlxstack.api.dialects.anthropic import routes as anthropic
from mlxstack.api.dialects.llama_server import routes as llama_server
from mlxstack.api.dialects.lm_studio import routes as lm_studio
from mlxstack.api.dialects.native import routes as native
from mlxstack.api.dialects.ollama import routes as ollama
from mlxstack.api.dialects.openai_chat import routes as openai_chat
from mlxstack.api.dialects.openai_completions import routes as openai_completions
from mlxstack.api.dialects.openai_embeddings import routes as openai_embeddings
from mlxstack.api.dialects.openai_models import routes as openai_models
from mlxstack.api.dialects.openai_responses import routes as openai_responses
from mlxstack.api.protocols import Dialect

DIALECTS: tuple[Dialect, ...] = (
    openai_chat.DIALECT,
    protocols.BARE_CHAT,
    openai_completions.DIALECT,
    openai_responses.DIALECT,
    openai_models.DIALECT,
    openai_embeddings.DIALECT,
    anthropic.DIALECT,
    llama_server.DIALECT,
    native.DIALECT,
    ollama.DIALECT,
    lm_studio.DIALECT,
)


def dialect_of(path: str) -> Dialect:
    """Dialect of a request by its path."""
    return protocols.dialect_of(path, DIALECTS)
