"""Agents by name: create, list, fork, rewind, evict, delete, history, next turn."""

import uuid
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import msgspec
from litestar import Response, delete, get, post
from litestar.params import FromPath, FromQuery, JSONBody
from litestar.response import Stream
from msgspec import UNSET, Struct, UnsetType, field, structs
from msgspec.structs import replace

from mlxstack.api import request_fields
from mlxstack.api.caller import checked_agent
from mlxstack.api.dialects.openai_chat import to_conversation
from mlxstack.api.dialects.openai_chat.messages import ChatMessageParam
from mlxstack.api.dialects.openai_chat.request_schema import ChatBody, ChatToolParam
from mlxstack.api.dialects.openai_chat.response_schema import ChatCompletion
from mlxstack.api.dialects.openai_chat.stream import ChatRenderer
from mlxstack.api.disconnect import cancel_on_disconnect
from mlxstack.api.guards import UNLOADED, can_access, check_agent, check_raise, is_unscoped
from mlxstack.api.openapi import response_spec
from mlxstack.api.request_fields import read_known, resolve_model
from mlxstack.api.response_headers import AGENT, cache_headers
from mlxstack.api.run_generation import AnyRequest, TheService
from mlxstack.api.streaming import BEAT_S, LOOKUP_S, frames, interleaved, streamed
from mlxstack.core.conversation import Conversation
from mlxstack.core.errors import BadRequest
from mlxstack.core.request import UNLIMITED, Priority
from mlxstack.core.response_parts import gather
from mlxstack.core.thinking import Effort
from mlxstack.core.units import tokens_in
from mlxstack.service.calls import agents
from mlxstack.service.calls.admission import AgentTurnRequest, stream_turn
from mlxstack.service.calls.agents import AgentChanges, AgentDetails
from mlxstack.service.calls.generation import Generation
from mlxstack.service.parts.stored_messages import write_message
from mlxstack.service.service import Service
from mlxstack.text.images.reader import ImageReader

PRIORITIES = {priority.name.lower(): priority for priority in Priority}
EFFORTS = {effort.value: effort for effort in Effort}
DEFAULT = "default"
"""Value that clears a setting of an agent."""
MIN_TOKENS = {"thinking_budget": UNLIMITED, "max_context": 64}
"""Least number of tokens of each setting; that of a context is that of a slot."""
MAX_TOKENS = 2**31 - 1
NO = (None, "", "0", "false")
T = TypeVar("T")
V = TypeVar("V")


class CreateBody(Struct):
    """POST /v1/agents; `messages` are the history; the id is optional."""

    id: str | None = None
    messages: list[ChatMessageParam] | None = None
    tools: list[ChatToolParam] | None = None


class ChangeBody(Struct):
    """Settings to change; "default" clears one, null keeps it."""

    priority: str | None = None
    """"high", "normal" or "low"."""
    is_pinned: bool | None = None
    thinking_budget: int | str | None = None
    """Maximum reasoning tokens: a number or `2k`; 0 has none, -1 no maximum."""
    effort: str | None = None
    """"none", "minimal", "low", "medium", "high", "xhigh" or "max"."""
    max_context: int | str | None = None
    """Maximum tokens of prompt and answer together: a number or `32k`."""


class ForkBody(Struct):
    """POST /v1/agents/{id}/fork; `id` is that of the new agent."""

    id: str


class RewindBody(Struct):
    """POST /v1/agents/{id}/rewind; the number of messages that stay."""

    n_messages: int


@get("/v1/agents", opt=UNLOADED)
async def list_agents(request: AnyRequest, service: TheService) -> dict[str, Any]:
    """All agents that the key allows, the last used first."""
    details = await agents.everyone(service)
    seen = [
        shown(request, agent_details)
        for agent_details in details
        if can_access(request, agent_details.view.id)
    ]
    return {"object": "list", "data": seen}


@post("/v1/agents", status_code=200)
async def create_agent(
    request: AnyRequest, service: TheService, data: JSONBody[CreateBody]
) -> Response[dict[str, Any]]:
    """Create an agent, with optional history; 409 for a taken id."""
    agent = f"agent-{uuid.uuid4().hex[:12]}"
    if data.id is not None:
        agent = checked_agent(data.id, "id")
    check_agent(request, agent)
    past = Conversation(())
    if data.messages:
        body = ChatBody(messages=data.messages, tools=data.tools)
        convert = partial(to_conversation.conversation, body)
        past = await service.text_processor.read(convert)
    return of_new(agent, shown(request, await agents.create(service, agent, past)))


@get("/v1/agents/{agent:str}", opt=UNLOADED)
async def show_agent(
    request: AnyRequest, service: TheService, agent: FromPath[str]
) -> dict[str, Any]:
    """Place, cost and last turns of an agent."""
    return shown(request, await agents.one(service, agent))


@post("/v1/agents/{agent:str}", status_code=200)
async def change_agent(
    request: AnyRequest, service: TheService, agent: FromPath[str], data: JSONBody[ChangeBody]
) -> dict[str, Any]:
    """Change an agent's settings: priority, pin, thinking, context."""
    changes = AgentChanges(
        priority=_changed(data.priority, partial(read_known, PRIORITIES, param="priority")),
        is_pinned=UNSET if data.is_pinned is None else data.is_pinned,
        thinking_budget=_changed(data.thinking_budget, partial(_tokens, "thinking_budget")),
        effort=_changed(data.effort, partial(read_known, EFFORTS, param="effort")),
        max_context=_changed(data.max_context, partial(_tokens, "max_context")),
    )
    if isinstance(changes.priority, Priority):
        check_raise(request, changes.priority)
    return shown(request, await agents.change(service, agent, changes))


@delete("/v1/agents/{agent:str}", status_code=200)
async def delete_agent(
    service: TheService, agent: FromPath[str], evict_only: FromQuery[str | None] = None
) -> dict[str, Any]:
    """Delete an agent; `?evict_only=1` frees only its KV in memory."""
    if evict_only in NO:
        await agents.delete(service, agent)
        return {"id": agent, "object": "agent", "deleted": True}
    n_tokens = await agents.evict(service, agent)
    return {"id": agent, "object": "agent", "deleted": False, "n_evicted": n_tokens}


@get("/v1/agents/{agent:str}/history", opt=UNLOADED)
async def show_history(service: TheService, agent: FromPath[str]) -> dict[str, Any]:
    """All messages, as a chat request would send them."""
    past = await agents.past(service, agent)
    messages = [write_message(message) for message in past.messages]
    return {"id": agent, "object": "agent.history", "messages": messages}


@post("/v1/agents/{agent:str}/fork", status_code=200)
async def fork_agent(
    request: AnyRequest, service: TheService, agent: FromPath[str], data: JSONBody[ForkBody]
) -> Response[dict[str, Any]]:
    """Fork a new agent from this one."""
    check_agent(request, checked_agent(data.id, "id"))
    return of_new(data.id, shown(request, await agents.fork(service, agent, data.id)))


@post("/v1/agents/{agent:str}/rewind", status_code=200)
async def rewind_agent(
    request: AnyRequest, service: TheService, agent: FromPath[str], data: JSONBody[RewindBody]
) -> dict[str, Any]:
    """Rewind the history to an earlier message."""
    return shown(request, await agents.rewind(service, agent, data.n_messages))


def _changed(value: V | None, read: Callable[[V], T]) -> T | UnsetType | None:
    """Setting by a field: UNSET without it, None for "default"."""
    if value is None:
        return UNSET
    if value == DEFAULT:
        return None
    return read(value)


def _tokens(param: str, value: int | str) -> int:
    """Number of tokens, also as `32k`. Raises BadRequest."""
    n_tokens = tokens_in(value) if isinstance(value, str) else value
    least = MIN_TOKENS[param]
    if n_tokens is None or not least <= n_tokens <= MAX_TOKENS:
        raise BadRequest(
            f"{param} is {value!r}; it must be a number of tokens from {least} to {MAX_TOKENS}, "
            'such as 2048 or "2k", or "default"',
            param,
        )
    return n_tokens


def of_new(agent: str, content: T) -> Response[T]:
    """Response whose header names the new agent, for gateways."""
    return Response(content, headers={AGENT: agent}, media_type="application/json")


def shown(request: AnyRequest, details: AgentDetails) -> dict[str, Any]:
    """Agent as an object: the fields of `core.status.AgentView`, and some sums.

    The diverging cached text may be another agent's: a key of some agents does not read it.
    """
    view = details.view
    if view.miss is not None and not is_unscoped(request):
        view = replace(view, miss=replace(view.miss, text_cached=""))
    fields: dict[str, Any] = msgspec.to_builtins(view)
    return fields | {
        "object": "agent",
        "priority": view.priority.name.lower(),
        "is_explicit": details.is_explicit,
        "cached_share": view.n_cached / view.n_prompt if view.n_prompt else 0.0,
        "bytes": {
            "live": details.live_bytes,
            "parked": details.parked_bytes,
            "disk": details.disk_bytes,
        },
    }


class GenerateBody(ChatBody, kw_only=True):
    """POST /v1/agents/{id}/generate: `messages`, or `append` to the stored history.

    `queue` waits for the agent's turn instead of a 409.
    """

    messages: list[ChatMessageParam] = field(default_factory=list)
    append: list[ChatMessageParam] | None = None
    queue: bool | None = None


class AgentNote(Struct, frozen=True):
    """Agent of a completion; `n_tokens` is the length of its context now."""

    id: str
    n_tokens: int
    cached_tokens: int


class AgentCompletion(ChatCompletion, frozen=True, kw_only=True):
    """Chat completion with its agent."""

    agent: AgentNote


@post("/v1/agents/{agent:str}/generate", status_code=200, responses=response_spec(AgentCompletion))
async def generate_for_agent(
    request: AnyRequest, service: TheService, agent: FromPath[str], data: JSONBody[GenerateBody]
) -> Response[AgentCompletion] | Stream:
    """Generate the next turn; 409 for a busy agent unless queued."""
    model = resolve_model(service, data.model)
    agent = checked_agent(agent, "agent")
    convert = partial(_turn_request, service, data, request)
    turn = await cancel_on_disconnect(request, service.text_processor.read(convert))
    renderer = ChatRenderer(data, turn.options.id, model, service.text_processor)
    if data.stream:
        return await _stream(service, agent, turn, renderer)
    return await cancel_on_disconnect(request, _whole(service, agent, turn, renderer))


async def _whole(
    service: Service, agent: str, turn: AgentTurnRequest, renderer: ChatRenderer
) -> Response[AgentCompletion]:
    orders: list[Generation] = []
    parts = stream_turn(service, agent, turn, BEAT_S, BEAT_S, orders.append)
    async with aclosing(parts):
        reply = await gather(parts)
    work = reply.ended.work
    completion = renderer.whole((reply,))
    note = AgentNote(agent, work.n_prompt + work.n_generated, work.n_cached)
    headers = cache_headers(orders[0], reply.started, work)
    return Response(
        AgentCompletion(**structs.asdict(completion), agent=note),
        headers=headers,
        media_type="application/json",
    )


async def _stream(
    service: Service, agent: str, turn: AgentTurnRequest, renderer: ChatRenderer
) -> Stream:
    """Errors before the first part come before the headers."""
    orders: list[Generation] = []
    parts = stream_turn(service, agent, turn, LOOKUP_S, BEAT_S, orders.append)
    first = await anext(parts)
    headers = cache_headers(orders[0], first) if orders else {AGENT: agent}
    return streamed(frames(first, interleaved([parts]), renderer), headers)


def _turn_request(
    service: Service, body: GenerateBody, request: AnyRequest, images: ImageReader
) -> AgentTurnRequest:
    if bool(body.messages) == bool(body.append):
        raise BadRequest("give either messages (all of them) or append (what is new)", "messages")
    request_fields.only_one(body.n)
    chosen = to_conversation.options(body, request, service)
    if chosen.drops_kv:
        raise BadRequest(
            "cache is drop, but the turn of an agent is kept; send it to /v1/chat/completions",
            "cache",
        )
    whole = body
    if body.append:
        whole = structs.replace(body, messages=body.append)
    return AgentTurnRequest(
        conversation=to_conversation.conversation(whole, images),
        options=chosen,
        is_added=bool(body.append),
        is_patient=bool(body.queue),
    )
