"""Model list, in fields that clients of OpenAI, Anthropic and llama-server read."""

from datetime import UTC, datetime

from litestar import get, head
from litestar.params import FromPath
from msgspec import Struct

from mlxstack.api.dialects.ollama.models import capabilities
from mlxstack.api.guards import PUBLIC
from mlxstack.api.request_fields import names, resolve_model
from mlxstack.api.run_generation import TheService
from mlxstack.service.service import Service


class ModelMeta(Struct, frozen=True):
    """Sizes in tokens, parameters and bytes."""

    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_params: int
    size: int


class ModelCard(Struct, frozen=True):
    """Entry of `data`, for OpenAI's and Anthropic's clients.

    `features` is a name of our own: Anthropic's `capabilities` is an object. The context in tokens
    has the names of OpenRouter and of vLLM, by which many clients find it.
    """

    id: str
    created: int
    created_at: str
    display_name: str
    max_input_tokens: int
    max_tokens: int
    context_length: int
    max_model_len: int
    meta: ModelMeta
    aliases: tuple[str, ...]
    features: tuple[str, ...] = ()
    input_modalities: tuple[str, ...] = ("text",)
    tags: tuple[str, ...] = ()
    object: str = "model"
    owned_by: str = "mlx-stack"
    type: str = "model"
    lifecycle: str = "active"


class LlamaModel(Struct, frozen=True):
    """Element of llama-server's own list, next to `data`."""

    name: str
    model: str
    type: str = "model"
    description: str = ""
    tags: tuple[str, ...] = ("",)
    capabilities: tuple[str, ...] = ("completion",)


class Models(Struct, frozen=True):
    data: tuple[ModelCard, ...]
    models: tuple[LlamaModel, ...]
    first_id: str
    last_id: str
    has_more: bool = False
    object: str = "list"


@head(["/v1/models", "/models"], opt=PUBLIC)
async def probe_models() -> None:
    """Reachability probe of clients."""


@get(["/v1/models", "/models"], opt=PUBLIC)
async def list_models(service: TheService) -> Models:
    """List every name of the one model."""
    models = tuple(_model(service, name) for name in names(service))
    return Models(
        data=models,
        models=tuple(
            LlamaModel(model.id, model.id, capabilities=model.features) for model in models
        ),
        first_id=models[0].id,
        last_id=models[-1].id,
    )


@get(["/v1/models/{name:path}", "/models/{name:path}"], opt=PUBLIC)
async def get_model(service: TheService, name: FromPath[str]) -> ModelCard:
    """Model by any accepted name, slashes included."""
    return _model(service, resolve_model(service, name.removeprefix("/")))


def _model(service: Service, name: str) -> ModelCard:
    facts = service.facts
    n_ctx = service.n_ctx
    features = capabilities(service)
    return ModelCard(
        id=name,
        created=int(service.stats.started_at),
        created_at=datetime.fromtimestamp(int(service.stats.started_at), UTC).isoformat(),
        display_name=name,
        max_input_tokens=n_ctx,
        max_tokens=n_ctx,
        context_length=n_ctx,
        max_model_len=n_ctx,
        meta=ModelMeta(n_ctx, facts.n_ctx_train, facts.n_vocab, facts.n_params, facts.n_bytes),
        aliases=tuple(alias for alias in names(service) if alias != name),
        features=features,
        input_modalities=("text", "image") if "vision" in features else ("text",),
    )
