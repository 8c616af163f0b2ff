"""Administration of the prefix cache: statistics, pins, warming, clearing."""

import asyncio
import time
import uuid

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.commands import CollectGarbage, FreedBytes, GCResult, PinnedPrefix
from mlxstack.core.engine_events import RequestFinished
from mlxstack.core.errors import BadRequest
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Caller, Priority, Request
from mlxstack.core.status import CacheView
from mlxstack.service.parts.disk_view import disk_view, with_disk
from mlxstack.service.parts.prefix_openings import with_openings
from mlxstack.service.parts.request_log import misses_of
from mlxstack.service.parts.text_processor import TextProcessor
from mlxstack.service.service import Service

PATIENCE_S = 600.0


async def look(service: Service, limit: int = 20) -> CacheView:
    """Statistics of the prefix cache, with first words and the last misses."""
    view = await asyncio.wrap_future(service.cache.stats(limit))
    log = service.request_log
    prefixes = with_openings(view.prefixes, service.agent_registry, service.text_processor)
    misses = misses_of(log.requests(), limit)
    factory = service.engine_factory
    disk = await asyncio.to_thread(disk_view, factory.store, factory.counter)
    view = with_disk(view, service.preset.prefix_cache.disk, disk)
    return replace(view, misses=misses, losses=log.losses, prefixes=prefixes)


class Prefix(Struct, frozen=True):
    """Prefix in tokens of the text processor `text_processor`, under a `salt`.

    `is_for_peer`: another service asked for it.
    """

    prompt: PromptTokens
    text_processor: TextProcessor
    salt: str = ""
    is_for_peer: bool = False


async def pin(service: Service, name: str, prefix: Prefix) -> PinnedPrefix:
    """Compute the missing part of a prefix, then pin it.

    Raises BadRequest when it is shorter than a block, and as `warm` does.
    """
    _check_name(name)
    n_tokens = len(prefix.prompt.tokens)
    block = service.preset.prefix_cache.block_size
    if n_tokens < block:
        raise BadRequest(
            f"the prefix has {n_tokens} tokens; a block, the least that is kept, has {block}: "
            "give a longer one",
            "tokens",
        )
    await warm(service, prefix)
    service.require_model(prefix.text_processor)
    return await service.change_cache(service.cache.pin(name, prefix.prompt, prefix.salt))


async def pin_known(service: Service, name: str, key: str) -> PinnedPrefix:
    """Pin a cached prefix under this name. Raises BadRequest, or NotFound."""
    _check_name(name)
    return await service.change_cache(service.cache.pin_known(name, key))


async def warm(service: Service, prefix: Prefix) -> None:
    """Prefill a prefix at low priority.

    Raises BadRequest when it does not fit a slot, Busy for another model.
    """
    prompt = prefix.prompt
    n_tokens = len(prompt.tokens)
    if n_tokens >= service.n_ctx:
        raise BadRequest(
            f"the prefix has {n_tokens} tokens, a slot holds {service.n_ctx}", "tokens"
        )
    if not prompt.checkpoint_positions:
        prompt = replace(prompt, checkpoint_positions=(n_tokens - 1,))
    request = Request(
        id=f"warm-{uuid.uuid4().hex}",
        prompt=prompt,
        max_tokens=1,
        caller=Caller(salt=prefix.salt, priority=Priority.LOW),
        arrived=time.monotonic(),
        is_for_peer=prefix.is_for_peer,
    )
    with service.open(request, prefix.text_processor) as events:
        while not isinstance(await events.next(PATIENCE_S), RequestFinished):
            pass


async def warm_learned(service: Service) -> int:
    """Recompute the shared prefixes of the last run; returns their number."""
    text_processor = service.text_processor
    prefixes = await asyncio.wrap_future(service.cache.shared_prefixes())
    fitting = [prefix for prefix in prefixes if len(prefix.tokens) < service.n_ctx]
    for prompt in fitting:
        await warm(service, Prefix(prompt, text_processor))
        await service.change_cache(service.cache.retain(prompt))
    return len(fitting)


async def unpin(service: Service, name: str) -> None:
    """Unpin a named prefix. Raises NotFound."""
    await service.change_cache(service.cache.unpin(name))


async def clear(service: Service) -> FreedBytes:
    """Drop parked KV that is neither in use nor pinned."""
    return await service.change_cache(service.cache.clear())


async def sweep(service: Service, command: CollectGarbage) -> GCResult:
    """Delete unused KV on disk by age and bytes.

    Raises BadRequest or Conflict.
    """
    service.require()
    swept = await asyncio.wrap_future(service.generator.sweep(command))
    if not command.is_dry:
        await asyncio.to_thread(service.agent_store.look_again)
    return swept


def _check_name(name: str) -> None:
    """Names of prefixes are steps of a path."""
    if name in {"", ".", ".."} or "/" in name:
        raise BadRequest(f"{name!r} is not a valid prefix name; use a name without /", "name")
