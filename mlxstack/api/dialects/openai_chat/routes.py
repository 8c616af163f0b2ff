"""Routes of chat completions."""

from functools import partial
from uuid import uuid4

from litestar import Response, post
from litestar.params import JSONBody
from litestar.response import Stream
from msgspec import UNSET, UnsetType, structs

from mlxstack.api import request_fields
from mlxstack.api.dialects.openai_chat import to_conversation
from mlxstack.api.dialects.openai_chat.request_schema import ChatBody
from mlxstack.api.dialects.openai_chat.response_schema import ChatCompletion, InputTokens, Verbose
from mlxstack.api.dialects.openai_chat.stream import ChatRenderer
from mlxstack.api.disconnect import cancel_on_disconnect
from mlxstack.api.openapi import response_spec
from mlxstack.api.prompts import n_prompt_tokens
from mlxstack.api.request_fields import resolve_model
from mlxstack.api.run_generation import AnyRequest, TheService, answer, copies, n_choices
from mlxstack.api.tool_choice import allowed_tools, chosen_tool, tool_choice_mode
from mlxstack.core.errors import BadRequest
from mlxstack.service.calls.admission import admit
from mlxstack.service.parts.generation_options import GenerationOptions
from mlxstack.service.service import Service

PATHS = [
    "/v1/chat/completions", "/chat/completions", "/api/v0/chat/completions",
    "/v1/batch/chat/completions",
]  # fmt: skip


@post(PATHS, status_code=200, responses=response_spec(ChatCompletion))
async def chat_completions(
    request: AnyRequest, data: JSONBody[ChatBody], service: TheService
) -> Response[ChatCompletion] | Stream:
    """Answer a conversation, whole or as server-sent events."""
    model = resolve_model(service, data.model)
    n = n_choices(data.n, service.preset.slots.count)
    conversation = await cancel_on_disconnect(
        request, service.text_processor.read(partial(to_conversation.conversation, data))
    )
    generation = await cancel_on_disconnect(
        request, admit(service, conversation, options(data, request, service))
    )
    text_processor = generation.text_processor
    tokens = generation.request.tokens
    verbose: Verbose | UnsetType = UNSET
    if data.verbose:
        verbose = Verbose(text_processor.decode(tokens), len(tokens))
    renderer = ChatRenderer(data, generation.request.id, model, text_processor, n, verbose)
    return await answer(request, service, [copies(generation, n)], renderer, bool(data.stream))


@post(["/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"], status_code=200)
async def chat_input_tokens(data: JSONBody[ChatBody], service: TheService) -> InputTokens:
    """Count the prompt tokens of a body."""
    resolve_model(service, data.model)
    return InputTokens(await n_prompt_tokens(service, partial(to_conversation.conversation, data)))


def options(body: ChatBody, request: AnyRequest, service: Service) -> GenerationOptions:
    """Generation options of a chat body. Raises BadRequest."""
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    # mlx_lm.server has the number in `logprobs`.
    n_sent = None if isinstance(body.logprobs, bool) else body.logprobs
    n_top = request_fields.n_logprobs(bool(body.logprobs), body.top_logprobs or n_sent)
    choice = to_conversation.tool_choice(body)
    request_id = f"chatcmpl-{uuid4().hex}"
    common = request_fields.options(body, request_id, n_top, request, service)
    return structs.replace(
        common,
        tool_choice=tool_choice_mode(choice),
        forced_tool=chosen_tool(choice),
        allowed_tools=allowed_tools(choice, chosen_tool),
        response_format=to_conversation.response_format(body) or common.response_format,
        is_one_call=body.parallel_tool_calls is False or to_conversation.is_legacy(body),
        has_progress=bool(body.return_progress),
        predicted_text=to_conversation.predicted_text(body),
        thinking_budget=to_conversation.thinking_budget(body),
        omitted_tools=to_conversation.omitted_tools(body),
    )
