"""Routes of the Responses API."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from litestar import Response as HttpResponse
from litestar import post
from litestar.params import JSONBody
from litestar.response import Stream
from msgspec import structs

from mlxstack.api import request_fields
from mlxstack.api.caller import salt_of
from mlxstack.api.dialects.openai_chat.response_schema import InputTokens
from mlxstack.api.dialects.openai_responses import to_conversation
from mlxstack.api.dialects.openai_responses.recent_items import RecentItems
from mlxstack.api.dialects.openai_responses.request_schema import LOGPROBS, Item, ResponsesBody
from mlxstack.api.dialects.openai_responses.response_schema import Response
from mlxstack.api.dialects.openai_responses.stream import OnItem, ResponseStream
from mlxstack.api.dialects.openai_responses.tool_names import (
    ToolNames,
    forced_tool,
    omitted_tools,
    toolbox,
)
from mlxstack.api.disconnect import cancel_on_disconnect
from mlxstack.api.openapi import response_spec
from mlxstack.api.prompts import n_prompt_tokens
from mlxstack.api.request_fields import resolve_model
from mlxstack.api.run_generation import AnyRequest, TheService, answer
from mlxstack.api.tool_choice import allowed_tools, tool_choice_mode
from mlxstack.core.errors import BadRequest
from mlxstack.service.calls.admission import admit
from mlxstack.service.calls.generation import Generation
from mlxstack.service.parts.generation_options import GenerationOptions
from mlxstack.service.service import Service

T = TypeVar("T")

SEALED = "reasoning.encrypted_content"


@post(
    ["/v1/responses", "/responses", "/v1/batch/responses"],
    status_code=200,
    responses=response_spec(Response),
)
async def responses(
    request: AnyRequest, data: JSONBody[ResponsesBody], service: TheService
) -> HttpResponse[Response] | Stream:
    """Answer a list of items, whole or as server-sent events."""
    model = resolve_model(service, data.model)
    box = toolbox(data)
    data = resolved(data, request)
    options = options_of(data, f"resp_{uuid4().hex}", request, service, box)
    generation = await admitted(data, request, service, box, options)
    response = _response(data, generation, model)
    is_sealed = SEALED in (data.include or ())
    on_item = _on_item(data, request, options.caller.salt)
    renderer = ResponseStream(
        response, box, generation.text_processor, on_item, is_sealed=is_sealed
    )
    return await answer(request, service, [[generation]], renderer, bool(data.stream))


@post(["/v1/responses/input_tokens", "/responses/input_tokens"], status_code=200)
async def input_tokens(
    request: AnyRequest, data: JSONBody[ResponsesBody], service: TheService
) -> InputTokens:
    """Count the prompt tokens of a body."""
    resolve_model(service, data.model)
    return InputTokens(await n_input_tokens(data, request, service))


async def admitted(
    body: ResponsesBody,
    request: AnyRequest,
    service: Service,
    box: ToolNames,
    options: GenerationOptions,
) -> Generation:
    """Generation of a body without references."""
    convert = partial(to_conversation.conversation, body, box)
    conversation = await cancel_on_disconnect(request, service.text_processor.read(convert))
    with _of_input():
        return await cancel_on_disconnect(request, admit(service, conversation, options))


async def n_input_tokens(body: ResponsesBody, request: AnyRequest, service: Service) -> int:
    """Number of prompt tokens of a body."""
    body, box = resolved(body, request), toolbox(body)
    with _of_input():
        return await n_prompt_tokens(service, partial(to_conversation.conversation, body, box))


def _recent_items(request: AnyRequest) -> RecentItems:
    recent: RecentItems = request.app.state.setdefault("recent_items", RecentItems())
    return recent


def _on_item(body: ResponsesBody, request: AnyRequest, salt: str) -> OnItem:
    """Keep the items of the answer, unless `store` is false."""
    if body.store is False:
        return lambda _: None
    return partial(_recent_items(request).add, salt=salt)


def resolved(body: ResponsesBody, request: AnyRequest) -> ResponsesBody:
    """Body without references to items, and with the settings of its items.

    Raises BadRequest for unknown ones.
    """
    if not isinstance(body.input, list):
        return body
    salt = salt_of(request, body.cache_salt or "")
    resolved = structs.replace(body, input=_recent_items(request).resolve(body.input, salt))
    return to_conversation.configured(resolved)


@contextmanager
def _of_input() -> Iterator[None]:
    """Errors name the field `input` instead of `messages`."""
    try:
        yield
    except BadRequest as error:
        if error.param == "messages":
            error.param = "input"
        raise


def options_of(
    body: ResponsesBody, request_id: str, request: AnyRequest, service: Service, box: ToolNames
) -> GenerationOptions:
    """Generation options of a body. Raises BadRequest."""
    wants_logprobs = LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    n_top = request_fields.n_logprobs(wants_logprobs, body.top_logprobs)
    common = request_fields.options(body, request_id, n_top, request, service)
    name_of = partial(forced_tool, box)
    return structs.replace(
        common,
        tool_choice=tool_choice_mode(body.tool_choice),
        forced_tool=name_of(body.tool_choice),
        allowed_tools=allowed_tools(body.tool_choice, name_of),
        response_format=to_conversation.response_format(body) or common.response_format,
        is_one_call=body.parallel_tool_calls is False,
        omitted_tools=omitted_tools(body),
    )


def _response(body: ResponsesBody, generation: Generation, model: str) -> Response:
    """Response before its first output item.

    `max_tool_calls` bounds calls that a server runs itself, of which there are none here.
    """
    reasoning = body.reasoning or {}
    text = body.text or {}
    sampling = generation.request.sampling
    return Response(
        id=generation.request.id,
        created_at=int(time.time()),
        model=model,
        instructions=body.instructions,
        tools=tuple(map(_repeated_tool, body.tools or ())),
        tool_choice=body.tool_choice or "auto",
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        top_logprobs=body.top_logprobs or 0,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=_of_type(body.max_tool_calls, int),
        reasoning={name: reasoning.get(name) for name in ("effort", "summary")},
        # Some clients refuse a text without a format.
        text={**text, "format": text.get("format") or {"type": "text"}},
        metadata=_of_type(body.metadata, dict) or {},
        prompt_cache_key=_of_type(body.prompt_cache_key, str),
        safety_identifier=_of_type(body.safety_identifier, str),
    )


def _of_type(value: Any, kind: type[T]) -> T | None:
    """A value that has the type that clients expect."""
    return value if isinstance(value, kind) else None


FUNCTION = {"description": None, "parameters": None, "strict": None}
"""Fields that a function of a response always has."""


def _repeated_tool(tool: Item) -> Item:
    if tool.get("type") == "function":
        return {**FUNCTION, **tool}
    return tool
