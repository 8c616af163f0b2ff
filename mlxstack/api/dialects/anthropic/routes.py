"""Routes of the Messages API."""

from collections.abc import Callable
from functools import partial
from uuid import uuid4

from litestar import Response, post
from litestar.params import JSONBody
from litestar.response import Stream
from msgspec import structs

from mlxstack.api import request_fields
from mlxstack.api.caller import client_name
from mlxstack.api.dialects.anthropic.request_schema import MessagesBody
from mlxstack.api.dialects.anthropic.response_schema import MessageResponse, TokenCount
from mlxstack.api.dialects.anthropic.stream import MessageStream, ResponseIds
from mlxstack.api.dialects.anthropic.to_conversation import (
    conversation,
    require_answerable,
    response_format,
    tool_choice_mode,
)
from mlxstack.api.dialects.anthropic.typed_tools import omitted_tools
from mlxstack.api.disconnect import cancel_on_disconnect
from mlxstack.api.guards import request_id
from mlxstack.api.openapi import response_spec
from mlxstack.api.prompts import n_prompt_tokens
from mlxstack.api.request_fields import resolve_model
from mlxstack.api.run_generation import AnyRequest, TheService, answer
from mlxstack.core.conversation import Conversation
from mlxstack.service.calls.admission import admit
from mlxstack.service.parts.generation_options import GenerationOptions
from mlxstack.service.service import Service

# Limit of requests that lack the one that the protocol requires.
MAX_TOKENS = 4096


@post(
    ["/v1/messages", "/v1/batch/messages"],
    status_code=200,
    responses=response_spec(MessageResponse),
)
async def messages(
    request: AnyRequest, data: JSONBody[MessagesBody], service: TheService
) -> Response[MessageResponse] | Stream:
    """Answer a conversation, whole or as server-sent events."""
    model = resolve_model(service, data.model)
    parsed = await cancel_on_disconnect(
        request, service.text_processor.read(_converter(data, request))
    )
    require_answerable(parsed)
    generation = await cancel_on_disconnect(
        request, admit(service, parsed, _options(service, data, parsed, request))
    )
    names = ResponseIds(generation.request.id, model, request_id(request.scope))
    return await answer(request, service, [[generation]], MessageStream(names), bool(data.stream))


@post("/v1/messages/count_tokens", status_code=200)
async def count_tokens(
    request: AnyRequest, data: JSONBody[MessagesBody], service: TheService
) -> TokenCount:
    """Count the prompt tokens of these messages; the engine is not involved."""
    resolve_model(service, data.model)
    return TokenCount(await n_prompt_tokens(service, _converter(data, request)))


def _converter(body: MessagesBody, request: AnyRequest) -> Callable[..., Conversation]:
    return partial(conversation, body, client=client_name(request.headers))


def _options(
    service: Service, body: MessagesBody, parsed: Conversation, request: AnyRequest
) -> GenerationOptions:
    """Generation options, with the fields that only Anthropic has."""
    options = request_fields.options(body, f"msg_{uuid4().hex[:24]}", None, request, service)
    default = service.preset.sampling.max_tokens or MAX_TOKENS
    choice = body.tool_choice
    budget = body.thinking.budget_tokens if body.thinking else None
    return structs.replace(
        options,
        max_tokens=default if options.max_tokens is None else options.max_tokens,
        stop=request_fields.stops(body.stop_sequences, "stop_sequences") or options.stop,
        tool_choice=tool_choice_mode(choice, parsed.tools),
        forced_tool=choice.name if choice and choice.type == "tool" else None,
        response_format=response_format(body) or options.response_format,
        thinking_budget=options.thinking_budget if budget is None else budget,
        call_prefix="toolu_",
        is_one_call=bool(choice and choice.disable_parallel_tool_use),
        omitted_tools=(*omitted_tools(body.tools or ()), *body.server_names),
    )
