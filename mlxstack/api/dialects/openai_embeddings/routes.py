"""Embedding routes, in OpenAI's and in llama-server's format."""

from base64 import b64encode
from typing import Any, Literal

from litestar import post
from litestar.params import JSONBody
from msgspec import Struct

from mlxstack.api.disconnect import cancel_on_disconnect
from mlxstack.api.prompts import Prompts, text_prompts
from mlxstack.api.request_fields import resolve_model
from mlxstack.api.run_generation import AnyRequest, TheService
from mlxstack.core.errors import BadRequest
from mlxstack.service.calls.embedding import EmbeddingResult, embed, numbers


class EmbeddingsBody(Struct):
    """Unknown fields are ignored. OpenAI's SDK requests base64 by default."""

    input: Prompts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None


class LlamaEmbeddingBody(Struct):
    """Body of llama-server; `content` and `input` mean the same."""

    content: Prompts | None = None
    input: Prompts | None = None


class Embedding(Struct, frozen=True, kw_only=True):
    """One vector, as numbers or as base64 of little-endian float32."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Struct, frozen=True, kw_only=True):
    """Vectors in the order of the input."""

    object: str = "list"
    model: str
    data: tuple[Embedding, ...]
    usage: EmbeddingUsage


@post(["/v1/embeddings", "/api/v0/embeddings"], status_code=200)
async def embeddings(
    request: AnyRequest, data: JSONBody[EmbeddingsBody], service: TheService
) -> Embeddings:
    """Embed each text as one normalized vector."""
    model = resolve_model(service, data.model)
    result = await cancel_on_disconnect(
        request, embed(service, text_prompts(data.input, "input"), data.dimensions)
    )
    is_text = data.encoding_format == "base64"
    return Embeddings(
        model=model,
        data=tuple(
            Embedding(index=i, embedding=b64encode(v).decode() if is_text else numbers(v))
            for i, v in enumerate(result.vectors)
        ),
        usage=EmbeddingUsage(result.n_tokens, result.n_tokens),
    )


@post(["/embedding", "/embeddings"], status_code=200)
async def native_embedding(
    request: AnyRequest, data: JSONBody[LlamaEmbeddingBody], service: TheService
) -> tuple[dict[str, Any], ...]:
    """Embed texts, with llama-server's response: a list of vectors per text."""
    texts = data.input if data.content is None else data.content
    if texts is None:
        raise BadRequest("content is missing: a text, or a list of texts", "content")
    result: EmbeddingResult = await cancel_on_disconnect(
        request, embed(service, text_prompts(texts, "content"), None)
    )
    return tuple(
        {"index": i, "embedding": [numbers(vector)]} for i, vector in enumerate(result.vectors)
    )
