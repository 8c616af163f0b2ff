"""Turns of agents whose history the server keeps, one after another."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, aclosing

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.conversation import Conversation
from mlxstack.core.errors import Conflict, NotFound
from mlxstack.core.response_parts import KeepAlive, ResponsePart
from mlxstack.service.calls import agents
from mlxstack.service.calls.admission import AdmittedRequest, admit
from mlxstack.service.calls.agents import AgentHistory
from mlxstack.service.calls.generation import stream_response
from mlxstack.service.parts.generation_options import GenerationOptions
from mlxstack.service.service import Service


class AgentTurnRequest(Struct, frozen=True):
    """Next turn of an agent.

    `conversation` is the whole one, or its addition (`is_added`) to the stored one. `is_patient`
    waits in line instead of being refused.
    """

    conversation: Conversation
    options: GenerationOptions
    is_added: bool = False
    is_patient: bool = False


async def admit_turn(service: Service, agent: str, turn: AgentTurnRequest) -> AdmittedRequest:
    """Admit the turn. Raises as `admit` and `agents.past` do."""
    conversation = turn.conversation
    if turn.is_added:
        before = await _past(service, agent)
        conversation = replace(
            conversation,
            messages=(*before.messages, *conversation.messages),
            tools=conversation.tools or before.tools,
        )
    return await admit(service, conversation, replace(turn.options, agent=agent))


async def parts(
    service: Service,
    agent: str,
    turn: AgentTurnRequest,
    first_s: float,
    beat_s: float,
    on_admitted: Callable[[AdmittedRequest], None],
) -> AsyncGenerator[ResponsePart, None]:
    """Parts of the reply in the agent's turn, KeepAlive while waiting.

    Calls `on_admitted` between them. Raises Conflict when the agent is busy and the request is
    not patient.
    """
    if service.agent_locks.is_busy(agent) and not turn.is_patient:
        raise Conflict(
            f"agent {agent} is answering already; wait for the end, or send `queue: true`"
        )
    text_processor = service.text_processor
    with service.agent_locks.joined(agent):
        entering = asyncio.create_task(_enter(service, agent, turn))
        try:
            patience_s = first_s
            while not (await asyncio.wait({entering}, timeout=patience_s))[0]:
                yield KeepAlive(0, 0)
                patience_s = beat_s
            entering.result()
            service.require_model(text_processor)
            admitted = await admit_turn(service, agent, turn)
            on_admitted(admitted)
            async with aclosing(stream_response(service, admitted, first_s, beat_s)) as rest:
                async for part in rest:
                    yield part
        finally:
            entering.cancel()
            if entering.done() and not entering.cancelled() and entering.exception() is None:
                entering.result().close()


async def _enter(service: Service, agent: str, turn: AgentTurnRequest) -> ExitStack:
    """Wait for the agent's turn, across the services of its home.

    Closing the result ends the turn. Raises Conflict when another service has the turn and the
    request is not patient.
    """
    with ExitStack() as held:
        lock = await service.agent_locks.enter(agent)
        held.callback(lock.release)
        locks = service.agent_locks
        acquire = locks.lock_turn if turn.is_patient else locks.lock_turn_now
        held.enter_context(await acquire(agent))
        return held.pop_all()


async def _past(service: Service, agent: str) -> AgentHistory:
    """History of an agent; a new one has none."""
    try:
        return await agents.past(service, agent)
    except NotFound:
        return AgentHistory()
