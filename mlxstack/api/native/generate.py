"""The next turn of an agent: its whole conversation, or only what is new."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from litestar import Response, post
from litestar.params import FromPath, JSONBody
from litestar.response import Stream
from msgspec import Struct, field, structs

from mlxstack.api import fields
from mlxstack.api.answer import AnyRequest
from mlxstack.api.described import described
from mlxstack.api.given import TheService
from mlxstack.api.headers import PREFIX, cache_headers
from mlxstack.api.leaving import unless_gone
from mlxstack.api.names import served
from mlxstack.api.native.agents import checked
from mlxstack.api.openai import chat, convert
from mlxstack.api.openai.bodies import ChatBody, Turn
from mlxstack.api.openai.routes import options
from mlxstack.api.openai.wire import Completion
from mlxstack.api.sse import BEAT_S, FIRST_S, streamed
from mlxstack.core.errors import BadRequest
from mlxstack.service import generate
from mlxstack.service.chat import Order
from mlxstack.service.generate import Wish
from mlxstack.service.parts import Part, gather
from mlxstack.service.service import Service
from mlxstack.service.status import saved_s


class GenerateBody(ChatBody, kw_only=True):
    """A chat request with `messages`, or with `append` to what the server keeps.

    `queue` waits for the agent's turn instead of a 409.
    """

    messages: list[Turn] = field(default_factory=list)
    append: list[Turn] | None = None
    queue: bool | None = None


class AgentNote(Struct, frozen=True):
    """Whose answer it is; `n_tokens` is how long its context is now."""

    id: str
    n_tokens: int
    cached_tokens: int


class AgentCompletion(Completion, frozen=True, kw_only=True):
    """A chat completion that says whose it is."""

    agent: AgentNote


@post("/v1/agents/{agent:str}/generate", status_code=200, responses=described(AgentCompletion))
async def generate_for_agent(
    request: AnyRequest, service: TheService, agent: FromPath[str], data: JSONBody[GenerateBody]
) -> Response[AgentCompletion] | Stream:
    """Answer, whole or as server-sent events; 409 while the agent is busy, unless queue is true."""
    model = served(service, data.model)
    agent = checked(agent, "agent")
    wish = await service.words.read(lambda: _wish(agent, data, request))
    wants = chat.Wants(
        id=wish.options.id,
        model=model,
        has_usage=bool(data.stream_options and data.stream_options.include_usage),
        has_pace=bool(data.timings_per_token),
    )
    if data.stream:
        return await _stream(service, agent, wish, wants)
    return await unless_gone(request, _whole(service, agent, wish, wants))


async def _whole(
    service: Service, agent: str, wish: Wish, wants: chat.Wants
) -> Response[AgentCompletion]:
    orders: list[Order] = []
    async with aclosing(generate.parts(service, agent, wish, BEAT_S, BEAT_S)) as both:
        reply = await gather(_parts(both, orders.append))
    work = reply.ended.work
    completion = chat.whole((reply,), wants, orders[0].words)
    note = AgentNote(agent, work.n_prompt + work.n_generated, work.n_cached)
    headers = cache_headers(orders[0].ask, reply.started, work.saved_s)
    return Response(
        AgentCompletion(**structs.asdict(completion), agent=note),
        headers=headers,
        media_type="application/json",
    )


async def _stream(service: Service, agent: str, wish: Wish, wants: chat.Wants) -> Stream:
    """What can be refused within the first second is refused before the headers."""
    orders: list[Order] = []
    words = service.words
    parts = _parts(generate.parts(service, agent, wish, FIRST_S, BEAT_S), orders.append)
    first = await anext(parts)
    headers = {PREFIX + "agent": agent}
    if orders:
        headers = cache_headers(orders[0].ask, first, saved_s(service.engine.snapshot(), first))
    return streamed(chat.frames(first, [parts], wants, words), headers)


async def _parts(
    both: AsyncGenerator[Order | Part, None], admit: Callable[[Order], None]
) -> AsyncGenerator[Part, None]:
    async with aclosing(both):
        async for one in both:
            if isinstance(one, Order):
                admit(one)
            else:
                yield one


def _wish(agent: str, body: GenerateBody, request: AnyRequest) -> Wish:
    if bool(body.messages) == bool(body.append):
        raise BadRequest("give either messages (all of them) or append (what is new)", "messages")
    fields.only_one(body.n)
    whole = structs.replace(body, messages=body.append) if body.append else body
    return Wish(
        conversation=convert.conversation(whole),
        options=structs.replace(options(body, request), agent=agent),
        is_added=bool(body.append),
        is_patient=bool(body.queue),
    )


ROUTES: list[Any] = [generate_for_agent]
