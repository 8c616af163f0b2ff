"""The next turn of an agent: its whole conversation, or only what is new."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from litestar import Response, post
from litestar.params import FromPath, JSONBody
from litestar.response import Stream
from msgspec import Struct, field, structs

from mlxstack.api import common_fields
from mlxstack.api.cache_headers import PREFIX, cache_headers
from mlxstack.api.dependencies import TheService
from mlxstack.api.dialects.native.agents import checked
from mlxstack.api.dialects.openai_chat import stream, to_conversation
from mlxstack.api.dialects.openai_chat.request_schema import ChatBody, ChatMessageParam
from mlxstack.api.dialects.openai_chat.response_schema import ChatCompletion
from mlxstack.api.dialects.openai_chat.routes import options
from mlxstack.api.disconnect import cancel_on_disconnect
from mlxstack.api.model_names import resolve_model
from mlxstack.api.openapi import response_spec
from mlxstack.api.run_generation import AnyRequest
from mlxstack.api.sse import BEAT_S, FIRST_S, streamed
from mlxstack.core.errors import BadRequest
from mlxstack.service.agents import turns
from mlxstack.service.agents.turns import AgentTurnRequest
from mlxstack.service.generation import AdmittedRequest
from mlxstack.service.response_parts import ResponsePart, gather
from mlxstack.service.service import Service
from mlxstack.service.stats import saved_s


class GenerateBody(ChatBody, kw_only=True):
    """A chat request with `messages`, or with `append` to what the server keeps.

    `queue` waits for the agent's turn instead of a 409.
    """

    messages: list[ChatMessageParam] = field(default_factory=list)
    append: list[ChatMessageParam] | None = None
    queue: bool | None = None


class AgentNote(Struct, frozen=True):
    """Whose answer it is; `n_tokens` is how long its context is now."""

    id: str
    n_tokens: int
    cached_tokens: int


class AgentCompletion(ChatCompletion, frozen=True, kw_only=True):
    """A chat completion that says whose it is."""

    agent: AgentNote


@post("/v1/agents/{agent:str}/generate", status_code=200, responses=response_spec(AgentCompletion))
async def generate_for_agent(
    request: AnyRequest, service: TheService, agent: FromPath[str], data: JSONBody[GenerateBody]
) -> Response[AgentCompletion] | Stream:
    """Answer, whole or as server-sent events; 409 while the agent is busy, unless queue is true."""
    model = resolve_model(service, data.model)
    agent = checked(agent, "agent")
    wish = await service.text_processor.read(lambda: _wish(agent, data, request))
    wants = stream.StreamConfig(
        id=wish.options.id,
        model=model,
        has_usage=bool(data.stream_options and data.stream_options.include_usage),
        has_pace=bool(data.timings_per_token),
    )
    if data.stream:
        return await _stream(service, agent, wish, wants)
    return await cancel_on_disconnect(request, _whole(service, agent, wish, wants))


async def _whole(
    service: Service, agent: str, wish: AgentTurnRequest, wants: stream.StreamConfig
) -> Response[AgentCompletion]:
    orders: list[AdmittedRequest] = []
    async with aclosing(turns.parts(service, agent, wish, BEAT_S, BEAT_S)) as both:
        reply = await gather(_parts(both, orders.append))
    work = reply.ended.work
    completion = stream.whole((reply,), wants, orders[0].words)
    note = AgentNote(agent, work.n_prompt + work.n_generated, work.n_cached)
    headers = cache_headers(orders[0].request, reply.started, work.saved_s)
    return Response(
        AgentCompletion(**structs.asdict(completion), agent=note),
        headers=headers,
        media_type="application/json",
    )


async def _stream(
    service: Service, agent: str, wish: AgentTurnRequest, wants: stream.StreamConfig
) -> Stream:
    """What can be refused within the first second is refused before the headers."""
    orders: list[AdmittedRequest] = []
    words = service.text_processor
    parts = _parts(turns.parts(service, agent, wish, FIRST_S, BEAT_S), orders.append)
    first = await anext(parts)
    headers = {PREFIX + "agent": agent}
    if orders:
        headers = cache_headers(orders[0].request, first, saved_s(service.engine.snapshot(), first))
    return streamed(stream.frames(first, [parts], wants, words), headers)


async def _parts(
    both: AsyncGenerator[AdmittedRequest | ResponsePart, None],
    admit: Callable[[AdmittedRequest], None],
) -> AsyncGenerator[ResponsePart, None]:
    async with aclosing(both):
        async for one in both:
            if isinstance(one, AdmittedRequest):
                admit(one)
            else:
                yield one


def _wish(agent: str, body: GenerateBody, request: AnyRequest) -> AgentTurnRequest:
    if bool(body.messages) == bool(body.append):
        raise BadRequest("give either messages (all of them) or append (what is new)", "messages")
    common_fields.only_one(body.n)
    whole = structs.replace(body, messages=body.append) if body.append else body
    return AgentTurnRequest(
        conversation=to_conversation.conversation(whole),
        options=structs.replace(options(body, request), agent=agent),
        is_added=bool(body.append),
        is_patient=bool(body.queue),
    )


ROUTES: list[Any] = [generate_for_agent]
