"""Routes of chat completions, for bodies of the Responses API too.

Cursor sends such bodies to the path of chats, and reads the answer of a chat.
"""

from functools import partial

from litestar import Response, post
from litestar.params import JSONBody
from litestar.response import Stream
from msgspec import UNSET, UnsetType, structs

from mlxstack.api.caller import client_name
from mlxstack.api.custom_tools import CustomTools
from mlxstack.api.dialects.openai_chat import to_conversation
from mlxstack.api.dialects.openai_chat.response_schema import ChatCompletion, InputTokens, Verbose
from mlxstack.api.dialects.openai_chat.stream import ChatRenderer
from mlxstack.api.dialects.openai_responses import chat_bodies, routes
from mlxstack.api.dialects.openai_responses.chat_bodies import AnyChatBody
from mlxstack.api.dialects.openai_responses.to_conversation import READERS
from mlxstack.api.dialects.openai_responses.tool_names import toolbox
from mlxstack.api.disconnect import cancel_on_disconnect
from mlxstack.api.openapi import response_spec
from mlxstack.api.prompts import n_prompt_tokens
from mlxstack.api.request_fields import resolve_model
from mlxstack.api.run_generation import AnyRequest, TheService, answer, copies, n_choices
from mlxstack.core.errors import BadRequest
from mlxstack.service.calls.admission import admit
from mlxstack.service.calls.generation import Generation
from mlxstack.service.service import Service

PATHS = [
    "/v1/chat/completions", "/chat/completions", "/api/v0/chat/completions",
    "/v1/batch/chat/completions",
]  # fmt: skip
CURSOR = "cursor"
"""Cursor in the User-Agent."""
ITEMS = READERS.keys() - {"message"}
"""Types of entries that are items wherever they stand."""


@post(PATHS, status_code=200, responses=response_spec(ChatCompletion))
async def chat_completions(
    request: AnyRequest, data: JSONBody[AnyChatBody], service: TheService
) -> Response[ChatCompletion] | Stream:
    """Answer a conversation, whole or as server-sent events."""
    model = resolve_model(service, data.model)
    n = n_choices(data.n, service.preset.slots.count)
    if _has_items(data):
        generation, custom_tools = await _of_items(request, data, service)
    else:
        generation, custom_tools = await _of_messages(request, data, service)
    text_processor = generation.text_processor
    tokens = generation.request.tokens
    verbose: Verbose | UnsetType = UNSET
    if data.verbose:
        verbose = Verbose(text_processor.decode(tokens), len(tokens))
    renderer = ChatRenderer(
        data, generation.request.id, model, text_processor, n, verbose, custom_tools
    )
    return await answer(request, service, [copies(generation, n)], renderer, bool(data.stream))


@post(["/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"], status_code=200)
async def chat_input_tokens(
    request: AnyRequest, data: JSONBody[AnyChatBody], service: TheService
) -> InputTokens:
    """Count the prompt tokens of a body."""
    resolve_model(service, data.model)
    if _has_items(data):
        with chat_bodies.named_as_sent(data):
            body = chat_bodies.responses_body(data, await request.json())
            return InputTokens(await routes.n_input_tokens(body, request, service))
    convert = partial(chat_bodies.conversation, chat_bodies.chat_body(data))
    return InputTokens(await n_prompt_tokens(service, convert))


def _has_items(body: AnyChatBody) -> bool:
    """Whether a body has items of the Responses API. Raises BadRequest."""
    if not body.messages:
        if body.input is None:
            reason = "Field required; a body with prompt belongs to /v1/completions"
            raise BadRequest(f"messages: {reason}", "messages")
        return True
    return any(
        isinstance(entry.type, str)
        and entry.type in ITEMS
        and (entry.content is None or not entry.role)
        for entry in body.messages
    )


async def _of_messages(
    request: AnyRequest, body: AnyChatBody, service: Service
) -> tuple[Generation, CustomTools]:
    """Generation of a body with messages, and its custom tools."""
    convert = partial(to_conversation.conversation, body)
    if body.instructions or body.system or body.text:
        body = chat_bodies.chat_body(body)
        convert = partial(chat_bodies.conversation, body)
    conversation = await cancel_on_disconnect(request, service.text_processor.read(convert))
    options = to_conversation.options(body, request, service)
    generation = await cancel_on_disconnect(request, admit(service, conversation, options))
    custom_tools = to_conversation.custom_tools(body)
    if custom_tools.names and client_name(request.headers).lower() == CURSOR:
        custom_tools = structs.replace(custom_tools, are_functions=True)
    return generation, custom_tools


async def _of_items(
    request: AnyRequest, body: AnyChatBody, service: Service
) -> tuple[Generation, CustomTools]:
    """Generation of a body with items, and its custom tools."""
    with chat_bodies.named_as_sent(body):
        sent = chat_bodies.responses_body(body, await request.json())
        box = toolbox(sent)
        sent = routes.resolved(sent, request)
        options = routes.options_of(sent, to_conversation.new_id(), request, service, box)
        options = structs.replace(
            options,
            has_progress=bool(body.return_progress),
            predicted_text=to_conversation.predicted_text(body),
            thinking_budget=to_conversation.thinking_budget(body),
        )
        generation = await routes.admitted(sent, request, service, box, options)
    return generation, CustomTools(box.custom_names, are_functions=True)
