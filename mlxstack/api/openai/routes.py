"""The routes of chat completions."""

from typing import Any
from uuid import uuid4

from litestar import Response, post
from litestar.params import JSONBody
from litestar.response import Stream
from msgspec import structs

from mlxstack.api import fields
from mlxstack.api.answer import AnyRequest, answer_stream, answer_whole, later
from mlxstack.api.choices import copies, n_choices
from mlxstack.api.described import response_spec
from mlxstack.api.given import TheService
from mlxstack.api.names import resolve_model
from mlxstack.api.openai import chat, convert
from mlxstack.api.openai.bodies import ChatBody
from mlxstack.api.openai.wire import ChatCompletion
from mlxstack.core.errors import BadRequest
from mlxstack.service.chat import admit
from mlxstack.service.options import GenerationOptions


@post(
    ["/v1/chat/completions", "/chat/completions", "/v1/batch/chat/completions"],
    status_code=200,
    responses=response_spec(ChatCompletion),
)
async def chat_completions(
    request: AnyRequest, data: JSONBody[ChatBody], service: TheService
) -> Response[ChatCompletion] | Stream:
    """Answer a conversation, whole or as server-sent events."""
    model = resolve_model(service, data.model)
    n = n_choices(data.n, service.preset.slots.count)
    conversation = await service.text_processor.read(lambda: convert.conversation(data))
    order = await admit(service, conversation, options(data, request))
    wants = _wants(data, order.request.id, model)
    words, orders = order.words, copies(order, n)
    if data.stream:
        return await answer_stream(
            service,
            order,
            lambda first, rest: chat.frames(
                first, [rest, *later(service, orders[1:])], wants, words
            ),
        )
    return await answer_whole(
        request, service, orders, lambda replies: chat.whole(replies, wants, words)
    )


def options(body: ChatBody, request: AnyRequest) -> GenerationOptions:
    """What a chat body wants beside its words. Raises BadRequest."""
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    n_top = fields.top_logprobs(body.top_logprobs or 0, "top_logprobs") if body.logprobs else None
    found = fields.options(body, f"chatcmpl-{uuid4().hex}", n_top, request)
    return structs.replace(
        found,
        tool_choice=convert.tool_choice_mode(body.tool_choice),
        forced_tool=convert.forced_tool(body),
        response_format=convert.response_format(body) or found.response_format,
        is_one_call=body.parallel_tool_calls is False,
        has_progress=bool(body.return_progress),
    )


def _wants(body: ChatBody, request: str, model: str) -> chat.StreamConfig:
    return chat.StreamConfig(
        id=request,
        model=model,
        has_usage=bool(body.stream_options and body.stream_options.include_usage),
        has_pace=bool(body.timings_per_token),
    )


ROUTES: list[Any] = [chat_completions]
