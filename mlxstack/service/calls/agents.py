"""Explicit agents: create, inspect, fork, rewind, evict, delete; record their turns."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict, replace

from mlxstack.core.commands import AgentKVLocation, EvictAgentFromSlot, pin_of
from mlxstack.core.conversation import Conversation, Message
from mlxstack.core.errors import BadRequest, Conflict, Damaged, NotFound, StackError
from mlxstack.core.image import ImagePart
from mlxstack.core.request import Priority
from mlxstack.core.status import AgentView
from mlxstack.core.thinking import Effort
from mlxstack.service.parts.agent_registry import (
    AgentFacts,
    AgentRecord,
    AgentSettings,
    facts_about,
    facts_of,
    settings_of,
)
from mlxstack.service.parts.agent_store import in_thread
from mlxstack.service.parts.stored_messages import read_stored, write_message
from mlxstack.service.service import Service
from mlxstack.store.agent_history import OF_IMAGE, History, image_name

log = logging.getLogger("mlxstack.agents")

MAX_AGENTS = 10_000
"""Limit of explicit agents, which stay until they are deleted."""

MAX_HISTORY_BYTES = 64 * 2**20
"""Text and images of a history; an image counts once."""
MAX_IMAGES = 100
"""Images of a history, as many as a request may have."""


class AgentDetails(Struct, frozen=True):
    """An agent, and the bytes of its KV for the served model.

    Live, parked and stored bytes may be the same KV in several places; other agents may share them.
    """

    view: AgentView
    is_explicit: bool
    live_bytes: int = 0
    parked_bytes: int = 0
    disk_bytes: int = 0


class AgentChanges(Struct, frozen=True):
    """Changes of an agent's settings; UNSET keeps a value, None clears it."""

    priority: Priority | UnsetType | None = UNSET
    is_pinned: bool | UnsetType = UNSET
    thinking_budget: int | UnsetType | None = UNSET
    effort: Effort | UnsetType | None = UNSET
    max_context: int | UnsetType | None = UNSET

    def fields(self) -> dict[str, Any]:
        """Values of the settings that change."""
        values = asdict(self)
        return {name: value for name, value in values.items() if value is not UNSET}


UNCHANGED = AgentChanges()


def check_room(service: Service, agent: str) -> None:
    """Raises Conflict for a new agent when there are too many already."""
    n_agents = service.agent_registry.n_agents
    if n_agents >= MAX_AGENTS and service.agent_registry.find(agent) is None:
        raise Conflict(
            f"there are {n_agents} agents, and no new one is kept; delete those that are over "
            "(DELETE /v1/agents/{id})"
        )


def check_history(agent: str, past: Conversation) -> None:
    """Raises BadRequest for a conversation that is too long for a history."""
    images = [image for message in past.messages for image in message.images]
    n_text = sum(len(message.text) + len(message.reasoning or "") for message in past.messages)
    n_bytes = n_text + sum(len(image.data) for image in images)
    if n_bytes <= MAX_HISTORY_BYTES and len(images) <= MAX_IMAGES:
        return
    # Only here: a hash of every image takes its time.
    different = set(images)
    n_bytes = n_text + sum(len(image.data) for image in different)
    if n_bytes <= MAX_HISTORY_BYTES and len(different) <= MAX_IMAGES:
        return
    raise BadRequest(
        f"the history of agent {agent} would have {n_bytes >> 20} MiB and {len(different)} images; "
        f"at most {MAX_HISTORY_BYTES >> 20} MiB and {MAX_IMAGES} images are kept: rewind it "
        f"(POST /v1/agents/{agent}/rewind), or begin another agent",
        "messages",
    )


async def everyone(service: Service) -> tuple[AgentDetails, ...]:
    """All agents, those without an explicit name too, the last used first."""
    return await _details(service, service.agent_registry.latest)


async def one(service: Service, agent: str) -> AgentDetails:
    """One agent. Raises NotFound."""
    return (await _details(service, (record_of(service, agent),)))[0]


async def create(service: Service, agent: str, past: Conversation) -> AgentDetails:
    """Create an agent with a history. Raises Conflict for a taken id."""
    check_room(service, agent)
    await asyncio.to_thread(check_history, agent, past)
    async with editing(service, agent):
        if await asyncio.to_thread(service.agent_store.has, agent):
            raise Conflict(f"there is an agent {agent} already; delete it or choose another id")
        with recorded(service, agent):
            await write_history(service, agent, past)
        return await one(service, agent)


async def past(service: Service, agent: str) -> Conversation:
    """History of an agent. Raises NotFound, or Conflict when damaged."""
    try:
        try:
            return await asyncio.to_thread(_read, service, agent)
        except Damaged:
            # Another writer may have removed an image between the two reads.
            return await asyncio.to_thread(_read, service, agent)
    except Damaged as error:
        raise Conflict(f"{error}; send its full `messages` once, or delete the agent") from error


def _read(service: Service, agent: str) -> Conversation:
    """History of an agent with its images. Raises NotFound, Damaged."""
    history = service.agent_store.read(agent)
    return Conversation(_messages(service, agent, history), facts_of(history).tools)


def _messages(service: Service, agent: str, history: History) -> tuple[Message, ...]:
    """Messages of a history with its images. Raises Damaged."""
    load = partial(service.agent_store.image, agent)
    return tuple(read_stored(message, load) for message in history.messages)


async def change(service: Service, agent: str, changes: AgentChanges) -> AgentDetails:
    """Change an agent's settings, from the next request on. Raises NotFound."""
    record = record_of(service, agent)
    record.settings = replace(record.settings, **changes.fields())
    if changes.is_pinned is not UNSET:
        await _pin(service, record)
    if record.is_explicit:
        async with service.agent_locks.writing(agent):
            await _replace(service, agent, await past(service, agent), changes)
    else:
        await _write_settings(service, record)
    return await one(service, agent)


async def _write_settings(service: Service, record: AgentRecord) -> None:
    """Write the settings of an agent without a history; a pin ends with its KV in memory."""
    defaults = asdict(AgentSettings())
    fields = {
        name: setting
        for name, setting in asdict(record.settings).items()
        if name != "is_pinned" and setting != defaults[name]
    }
    async with service.agent_locks.writing(record.name):
        await in_thread(service.agent_store.write_settings, record.name, fields)


async def fork(service: Service, agent: str, new_agent: str) -> AgentDetails:
    """Create `new_agent` with the history of `agent`; no KV is copied.

    Raises NotFound, or Conflict when there is a `new_agent` or the history is damaged.
    """
    record_of(service, agent)
    await past(service, agent)
    check_room(service, new_agent)
    async with editing(service, new_agent):
        await in_thread(service.agent_store.copy, agent, new_agent)
        record = service.agent_registry.record(new_agent, is_explicit=True)
        own = AgentChanges(**asdict(record.settings))
        await write_history(service, new_agent, await past(service, new_agent), own)
        return await one(service, new_agent)


async def rewind(service: Service, agent: str, n_messages: int) -> AgentDetails:
    """Keep the first messages only. Raises NotFound, Conflict when busy, BadRequest."""
    async with editing(service, agent):
        history = await past(service, agent)
        if not 0 <= n_messages <= len(history.messages):
            raise BadRequest(
                f"n_messages is {n_messages}; agent {agent} has {len(history.messages)} messages",
                "n_messages",
            )
        await write_history(
            service, agent, replace(history, messages=history.messages[:n_messages])
        )
        return await one(service, agent)


async def evict(service: Service, agent: str) -> int:
    """Free an agent's slot and memory, not its disk; tokens evicted."""
    async with service.agent_locks.acting(agent):
        record_of(service, agent)
        return await vacate(service, agent, is_kept=True)


async def delete(service: Service, agent: str) -> None:
    """Delete record, history and KV in memory.

    Raises NotFound, or Conflict when the agent is busy. Its KV files stay until a collection of the
    store finds nothing that names them.
    """
    async with editing(service, agent):
        await forget_agent(service, record_of(service, agent))


async def record_turn(
    service: Service, agent: str, conversation: Conversation, reply: Message
) -> None:
    """Store a finished turn, before the client receives its end.

    A disk that refuses costs a line in the log, not the answer; the history is kept in memory until
    one of the next turns writes it.
    """
    messages = conversation.messages
    if conversation.continue_final and messages:
        begun = messages[-1]
        reply = replace(reply, text=begun.text + reply.text)
        messages = messages[:-1]
    past = Conversation((*messages, reply), conversation.tools)
    try:
        await write_history(service, agent, past)
    except StackError as error:
        log.warning("the history of agent %s was not written: %s", agent, error)
        facts = _facts(service, agent, past)
        service.agent_store.reserve(agent, await in_thread(_history, past, facts))
    record = service.agent_registry.record(agent, is_explicit=True)
    if record.settings.is_pinned:
        service.generator.cache.pin_agent(agent)


@asynccontextmanager
async def editing(service: Service, agent: str) -> AsyncIterator[None]:
    """Lock the history against changes. Raises Conflict when busy."""
    async with service.agent_locks.acting(agent):
        with await service.agent_locks.lock_turn_now(agent):
            yield


@contextmanager
def recorded(service: Service, agent: str) -> Iterator[AgentRecord]:
    """New record of an agent, dropped when its history is not written."""
    registry = service.agent_registry
    is_new = registry.find(agent) is None
    try:
        yield registry.record(agent, is_explicit=True)
    except StackError:
        if is_new:
            registry.forget(agent)
        raise


async def write_history(
    service: Service, agent: str, past: Conversation, changes: AgentChanges = UNCHANGED
) -> None:
    """Replace the history, after earlier writes."""
    async with service.agent_locks.writing(agent):
        await _replace(service, agent, past, changes)


async def _replace(service: Service, agent: str, past: Conversation, changes: AgentChanges) -> None:
    """Replace the history, but for `changes` with the stored settings.

    Another service of the home may have set them.
    """
    current = _facts(service, agent, past)

    def write() -> None:
        facts = current
        with suppress(StackError):
            stored = facts_of(service.agent_store.read(agent))
            facts = replace(facts, **asdict(settings_of(stored)))
        facts = replace(facts, **changes.fields())
        service.agent_store.write(agent, _history(past, facts))

    await in_thread(write)


def _facts(service: Service, agent: str, past: Conversation) -> AgentFacts:
    record = service.agent_registry.record(agent, is_explicit=True)
    return facts_about(record, past.tools)


def _history(past: Conversation, facts: AgentFacts) -> History:
    """History with its images beside the messages."""
    images: dict[str, bytes] = {}

    def url_of(image: ImagePart) -> str:
        name = image_name(image.data)
        images[name] = image.data
        return OF_IMAGE + name

    messages = tuple(write_message(message, url_of) for message in past.messages)
    return History(messages, msgspec.to_builtins(facts), images)


def exported(service: Service, agent: str) -> History:
    """History whose messages hold their images, for another service. Raises NotFound, Damaged."""
    history = service.agent_store.read(agent)
    messages = map(write_message, _messages(service, agent, history))
    return replace(history, messages=tuple(messages))


async def _details(service: Service, records: Sequence[AgentRecord]) -> tuple[AgentDetails, ...]:
    snapshot = service.engine.snapshot()
    kv_locations = await _located(service, tuple(record.name for record in records))
    locations = {location.agent: location for location in kv_locations}
    stored = service.agent_store.stored
    drawn = service.agent_registry.views(records, snapshot, service.name, locations, stored)
    live = {slot.id: slot.n_bytes for slot in snapshot.slots}
    return tuple(
        AgentDetails(
            view=view,
            is_explicit=record.is_explicit,
            live_bytes=live.get(view.slot, 0) if view.slot is not None else 0,
            parked_bytes=locations[record.name].memory_bytes,
            disk_bytes=locations[record.name].disk_bytes
            or _stored(service, record.name).disk_bytes,
        )
        for record, view in zip(records, drawn, strict=True)
    )


async def _located(service: Service, agents: tuple[str, ...]) -> tuple[AgentKVLocation, ...]:
    """Location of each agent's KV; on disk for an unloaded model."""
    if not service.is_unloaded:
        return await asyncio.wrap_future(service.cache.locate_agents(agents))
    return tuple(_stored(service, agent) for agent in agents)


def _stored(service: Service, agent: str) -> AgentKVLocation:
    """Saved KV of the served model, known without a request."""
    own = [kv for kv in service.agent_store.stored(agent) if kv.model == service.name]
    if own:
        return AgentKVLocation(agent, own[-1].n_tokens, 0, own[-1].n_bytes)
    return AgentKVLocation(agent)


async def forget_agent(service: Service, record: AgentRecord) -> None:
    """Delete record, history and KV in memory; the caller edits it."""
    # The history first: the agent keeps everything when the disk refuses.
    async with service.agent_locks.writing(record.name):
        with suppress(NotFound):
            await in_thread(service.agent_store.remove, record.name)
    record.settings = replace(record.settings, is_pinned=False)
    await _pin(service, record)
    await vacate(service, record.name, is_kept=False)
    service.agent_registry.forget(record.name)


async def vacate(service: Service, agent: str, *, is_kept: bool) -> int:
    """Take an agent out of its slots, and its KV out of memory unless `is_kept`; tokens."""
    n_tokens = 0
    for slot in service.engine.snapshot().slots:
        if slot.agent == agent:
            done: Any = await service.run_slot_command(EvictAgentFromSlot(slot.id, agent, is_kept))
            n_tokens += done.n_erased
    await service.change_cache(service.cache.release_agent(agent, is_kept=is_kept))
    return n_tokens


async def _pin(service: Service, record: AgentRecord) -> None:
    if record.settings.is_pinned:
        await service.change_cache(service.cache.pin_agent(record.name))
    else:
        with suppress(NotFound):
            await service.change_cache(service.cache.unpin(pin_of(record.name)))


def record_of(service: Service, agent: str) -> AgentRecord:
    """Record of an agent. Raises NotFound."""
    record = service.agent_registry.find(agent)
    if record is None:
        raise NotFound(f"there is no agent {agent}")
    return record
