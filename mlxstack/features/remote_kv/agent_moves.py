"""Agents that move to another service with their KV."""

import asyncio

from mlxstack.core.conversation import Conversation
from mlxstack.core.errors import Conflict, StackError
from mlxstack.features.remote_kv.service import peers_of
from mlxstack.features.remote_kv.values import AgentMove, MovedAgent
from mlxstack.service.calls.agents import (
    check_room,
    editing,
    exported,
    forget_agent,
    record_of,
    recorded,
    vacate,
    write_history,
)
from mlxstack.service.parts.agent_registry import facts_of, settings_of
from mlxstack.service.parts.agent_store import in_thread
from mlxstack.service.parts.stored_messages import read_stored
from mlxstack.service.service import Service
from mlxstack.store.agent_history import History


async def move(service: Service, agent: str, to: str, *, is_kept: bool) -> AgentMove:
    """Send an agent with its KV to the peer `to`.

    It is deleted here unless `is_kept`. Raises NotFound, BadRequest for a URL that is no peer,
    Conflict when the agent is busy or the peer refuses it; then the agent stays.
    """
    peers = peers_of(service)
    peer = peers.at(to)
    async with editing(service, agent):
        record = record_of(service, agent)
        history = await asyncio.to_thread(exported, service, agent)
        await vacate(service, agent, is_kept=True)
        await asyncio.wrap_future(service.generator.after_writes())
        identity = service.facts.identity.key()
        manifest = await asyncio.to_thread(service.agent_store.manifest, agent, identity)
        try:
            moved = MovedAgent(history.messages, history.facts, manifest)
            n_sent, n_tokens = await peers.push(peer, agent, moved)
        except StackError as error:
            raise Conflict(f"agent {agent} was not moved and stays here: {error}") from error
        if not is_kept:
            await forget_agent(service, record)
    n_bytes = manifest.n_bytes if manifest is not None else 0
    return AgentMove(agent, to, n_tokens, n_bytes, n_sent, is_kept)


async def receive(service: Service, agent: str, moved: MovedAgent) -> int:
    """Create an agent that another service sent; KV tokens that are here.

    Raises Conflict when the id has another history, BadRequest for a history that cannot be read,
    Damaged for KV that is not its own.
    """
    check_room(service, agent)
    async with editing(service, agent):
        if await asyncio.to_thread(service.agent_store.has, agent):
            stored = await asyncio.to_thread(exported, service, agent)
            # The answer of an earlier move may have been lost.
            if stored.messages != moved.messages:
                raise Conflict(f"there is an agent {agent} already; delete it or move another one")
        history = History(moved.messages, moved.facts)
        messages = tuple(read_stored(message) for message in moved.messages)
        facts = facts_of(history)
        n_tokens = 0
        if moved.manifest is not None:
            service.text_processor.check_kept(moved.manifest, "manifest.tokens")
            n_tokens = await asyncio.wrap_future(service.generator.import_kv(moved.manifest))
        with recorded(service, agent) as record:
            record.settings = settings_of(facts)
            record.sums = facts.sums
            record.used_at = facts.used_at
            await write_history(service, agent, Conversation(messages, facts.tools))
        if moved.manifest is not None:
            await in_thread(service.agent_store.put, agent, moved.manifest)
        return n_tokens
