"""Routes of Ollama's API."""

import asyncio
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any
from uuid import uuid4

from litestar import Response, get, head, post
from litestar.params import JSONBody
from litestar.response import Stream
from msgspec import structs

from mlxstack.api import request_fields, streaming
from mlxstack.api.dialects.ollama import to_conversation
from mlxstack.api.dialects.ollama.models import details, loaded_model, model_info, tagged_model
from mlxstack.api.dialects.ollama.request_schema import (
    OllamaChatBody,
    OllamaEmbedBody,
    OllamaEmbeddingsBody,
    OllamaGenerateBody,
    OllamaGenerationBody,
    OllamaModelBody,
    OllamaOptions,
)
from mlxstack.api.dialects.ollama.response_schema import (
    OLLAMA_VERSION,
    OllamaChat,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaGeneration,
    OllamaModelInfo,
    OllamaProcesses,
    OllamaStatus,
    OllamaTags,
    nanoseconds,
)
from mlxstack.api.dialects.ollama.stream import (
    OllamaChatRenderer,
    OllamaPromptRenderer,
    OllamaRenderer,
)
from mlxstack.api.disconnect import cancel_on_disconnect
from mlxstack.api.guards import EARLY, PUBLIC, UNLOADED
from mlxstack.api.openapi import lines_spec
from mlxstack.api.run_generation import AnyRequest, TheService, answer
from mlxstack.core.errors import NotFound
from mlxstack.core.request import UNLIMITED
from mlxstack.models.local_models import local_models
from mlxstack.service.calls.admission import admit, admit_text
from mlxstack.service.calls.embedding import embed, numbers
from mlxstack.service.calls.idle_unload import idle_limit_s
from mlxstack.service.parts.generation_options import GenerationOptions
from mlxstack.service.service import Service

LATEST = ":latest"


@post("/api/chat", status_code=200, responses=lines_spec(OllamaChat))
async def chat(
    request: AnyRequest, data: JSONBody[OllamaChatBody], service: TheService
) -> Response[Any] | Stream:
    """Answer a conversation, as lines of JSON or whole."""
    renderer = OllamaChatRenderer(_model(service, data.model), service.text_processor)
    _keep_alive(service, data.keep_alive)
    if not data.messages:
        return _loaded(renderer, service)
    convert = partial(to_conversation.chat_conversation, data)
    conversation = await cancel_on_disconnect(request, service.text_processor.read(convert))
    generation = await cancel_on_disconnect(
        request, admit(service, conversation, _options(data, request, service))
    )
    return await answer(request, service, [[generation]], renderer, data.stream is not False)


@post("/api/generate", status_code=200, responses=lines_spec(OllamaGeneration))
async def generate(
    request: AnyRequest, data: JSONBody[OllamaGenerateBody], service: TheService
) -> Response[Any] | Stream:
    """Answer one prompt, streamed or whole; `raw` prompts have no template."""
    renderer = OllamaPromptRenderer(_model(service, data.model), service.text_processor)
    _keep_alive(service, data.keep_alive)
    if not data.prompt:
        return _loaded(renderer, service)
    convert = partial(to_conversation.prompt_conversation, data)
    conversation = await cancel_on_disconnect(request, service.text_processor.read(convert))
    options = _options(data, request, service)
    if data.raw:
        generation = await cancel_on_disconnect(request, admit_text(service, data.prompt, options))
    else:
        generation = await cancel_on_disconnect(request, admit(service, conversation, options))
    return await answer(request, service, [[generation]], renderer, data.stream is not False)


@post("/api/embed", status_code=200)
async def embed_texts(
    request: AnyRequest, data: JSONBody[OllamaEmbedBody], service: TheService
) -> OllamaEmbeddings:
    """Embed texts; longer ones are truncated unless `truncate` is false."""
    model = _model(service, data.model)
    began = time.perf_counter()
    _keep_alive(service, data.keep_alive)
    texts = [data.input] if isinstance(data.input, str) else data.input
    work = embed(service, texts, data.dimensions, is_cut=data.truncate is not False)
    result = await cancel_on_disconnect(request, work)
    return OllamaEmbeddings(
        model=model,
        embeddings=tuple(numbers(vector) for vector in result.vectors),
        total_duration=nanoseconds(time.perf_counter() - began),
        load_duration=0,
        prompt_eval_count=result.n_tokens,
    )


@post("/api/embeddings", status_code=200)
async def embed_prompt(
    request: AnyRequest, data: JSONBody[OllamaEmbeddingsBody], service: TheService
) -> OllamaEmbedding:
    """Embed one text."""
    _model(service, data.model)
    _keep_alive(service, data.keep_alive)
    result = await cancel_on_disconnect(request, embed(service, [data.prompt], None, is_cut=True))
    return OllamaEmbedding(numbers(result.vectors[0]))


@get("/api/version", opt=EARLY)
async def version() -> dict[str, str]:
    """Release of Ollama that clients may take this service for."""
    return {"version": OLLAMA_VERSION}


@head(["/api/tags", "/api/version"], opt=EARLY)
async def probe() -> None:
    """Reachability probe of clients."""


@get("/api/tags", opt=PUBLIC)
async def tags(service: TheService) -> OllamaTags:
    """List the one model of this service."""
    return OllamaTags((tagged_model(service, await details(service)),))


@get("/api/ps", opt=UNLOADED)
async def processes(service: TheService) -> OllamaProcesses:
    """List the model if it is in memory."""
    if service.is_unloaded:
        return OllamaProcesses(())
    return OllamaProcesses((loaded_model(service, await details(service)),))


@post("/api/show", status_code=200, opt=UNLOADED)
async def show(data: JSONBody[OllamaModelBody], service: TheService) -> OllamaModelInfo:
    """Describe the model: template, sizes, capabilities."""
    _model(service, data.model or data.name)
    return model_info(service, await details(service))


@post("/api/pull", status_code=200, opt=UNLOADED, responses=lines_spec(OllamaStatus))
async def pull(
    data: JSONBody[OllamaModelBody], service: TheService
) -> Response[OllamaStatus] | Stream:
    """Confirm a model that is on this machine; nothing is downloaded."""
    model = (data.model or data.name or "").removesuffix(LATEST)
    if model not in request_fields.names(service):
        local = await asyncio.to_thread(local_models)
        if not any(local_model.name == model and local_model.is_complete for local_model in local):
            raise NotFound(
                f"model {model!r} is not on this machine, and clients download nothing; "
                "`mlx-stack pull` does"
            )
    if data.stream is False:
        return Response(OllamaStatus("success"))
    return streaming.streamed(_pulled(), {}, streaming.JSON_LINES)


async def _pulled() -> AsyncGenerator[bytes, None]:
    for status in ("pulling manifest", "success"):
        yield streaming.json_line(OllamaStatus(status))


def _loaded(renderer: OllamaRenderer, service: Service) -> Response[Any]:
    reason = "unload" if idle_limit_s(service) == 0 else "load"
    return Response(renderer.loaded(reason), media_type="application/json")


def _keep_alive(service: Service, keep_alive: float | str | None) -> None:
    """Set the time of the idle unload; see `idle_limit_s`."""
    if keep_alive is not None:
        service.gate.keep_alive(to_conversation.keep_alive_s(keep_alive))


def _model(service: Service, name: str | None) -> str:
    """Model name to echo; a tag `latest` is ignored. Raises UnknownModel."""
    request_fields.resolve_model(service, name.removesuffix(LATEST) if name else None)
    return name or service.name


def _options(
    body: OllamaGenerationBody, request: AnyRequest, service: Service
) -> GenerationOptions:
    """Generation options; as for Ollama, a `num_predict` below 1 is no limit."""
    fields = body.options or OllamaOptions()
    if body.cache is not None:
        fields = structs.replace(fields, cache=body.cache)
    n_top = request_fields.n_logprobs(body.logprobs, body.top_logprobs)
    options = request_fields.options(fields, f"ollama-{uuid4().hex}", n_top, request, service)
    limit = fields.num_predict
    return structs.replace(
        options,
        max_tokens=limit if limit is None or limit > 0 else UNLIMITED,
        response_format=to_conversation.constraint(body) or options.response_format,
    )
