"""What a service does by itself while it runs: warm prefixes, watch memory, log a summary."""

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mlxstack.core.act import Relieve, Sweep
from mlxstack.core.conversation import Conversation, Message, Role
from mlxstack.core.errors import BadRequest, Loading, StackError
from mlxstack.core.frame import CacheView
from mlxstack.core.preset import Kind, WarmPrefix
from mlxstack.core.snapshot import Counters
from mlxstack.host import pressure
from mlxstack.host.pressure import Level
from mlxstack.service import memory
from mlxstack.service.service import Service
from mlxstack.text.prompt import Spelling

log = logging.getLogger("mlxstack.duties")

LOOK_S = 5.0
SWEEP_S = 600.0
SAMPLE_S = 1.0


async def do(service: Service, level: Callable[[], Level] = pressure.level) -> None:
    """Until cancelled. `level` tells how short of memory the computer is."""
    spec = service.preset.prefix_cache
    async with asyncio.TaskGroup() as group:
        group.create_task(sample(service, SAMPLE_S))
        if service.preset.kind is Kind.EMBEDDING:
            return
        if spec.warm_on_startup:
            group.create_task(warm_all(service))
        if spec.metrics.enabled:
            group.create_task(summarise(service, spec.metrics.log_interval))
        group.create_task(watch_memory(service, level, LOOK_S))
        group.create_task(watch_disk(service, SWEEP_S))


async def warm_all(service: Service) -> None:
    """Compute and pin the preset's prefixes, and learned heads; what cannot be is logged."""
    for prefix in service.preset.prefix_cache.warm_prefixes:
        try:
            tokens = await _tokens(service, prefix)
            pinned = await memory.pin(service, prefix.name, tokens)
            log.info("warmed %s: %d tokens", pinned.name, pinned.n_tokens)
        except (OSError, ValueError, StackError) as error:
            log.warning("the prefix %s was not warmed: %s", prefix.name, error)
    try:
        n_heads = await memory.warm_learned(service)
        log.info("warmed %d heads that conversations shared", n_heads)
    except StackError as error:
        log.warning("learned heads were not warmed: %s", error)


async def summarise(service: Service, interval_s: float) -> None:
    """One line of numbers every `interval_s` seconds. No text of anybody."""
    while True:
        await asyncio.sleep(interval_s)
        # While the model is changed there is nothing to tell.
        with suppress(Loading):
            _tell(await memory.look(service, 1), service.snapshot().counters)


def _tell(view: CacheView, counters: Counters) -> None:
    log.info(
        "requests=%d hits=%d prompt=%d cached=%d generated=%d saved=%.1fs "
        "memory=%d/%d entries=%d evicted=%d",
        view.hour.n_requests, view.hour.n_hits, view.hour.n_prompt, view.hour.n_cached,
        counters.n_generated_tokens, view.hour.saved_s, view.memory_bytes,
        view.memory_budget or 0, view.n_entries, view.n_evicted,
    )  # fmt: skip


async def sample(service: Service, interval_s: float) -> None:
    """Count what was done, so that the charts of a dashboard that comes later are not empty."""
    while True:
        service.sample()
        await asyncio.sleep(interval_s)


async def watch_memory(service: Service, level: Callable[[], Level], interval_s: float) -> None:
    """When the computer runs short of memory, cold KV goes first, pinned KV never."""
    while True:
        now = await asyncio.to_thread(level)
        if now is not Level.CALM:
            with suppress(Loading):
                await _relieve(service, now)
        await asyncio.sleep(interval_s)


async def watch_disk(service: Service, interval_s: float) -> None:
    """What is too old, or too much, leaves the disk; other processes write there too."""
    while True:
        disk = service.preset.prefix_cache.disk
        if disk.max_bytes is not None or disk.max_age_s is not None:
            try:
                await asyncio.wrap_future(service.engine.sweep(Sweep()))
            except StackError as error:
                log.warning("the disk was not swept: %s", error)
        await asyncio.sleep(interval_s)


async def _relieve(service: Service, now: Level) -> None:
    freed = await asyncio.wrap_future(service.engine.tend(Relieve(now)))
    if freed.n_bytes:
        log.warning("memory is %s: %d bytes of KV let go", now.name.lower(), freed.n_bytes)


async def _tokens(service: Service, prefix: WarmPrefix) -> tuple[int, ...]:
    if prefix.tokens_file is not None:
        tokens = json.loads(await _read(prefix.tokens_file))
        if not isinstance(tokens, list) or not all(isinstance(t, int) for t in tokens):
            raise BadRequest(f"{prefix.tokens_file} is no JSON list of token ids")
        service.words.check(tokens, "tokens_file")
        return tuple(tokens)
    if prefix.text_file is not None:
        text = await _read(prefix.text_file)
        return await service.words.tokenize(text, Spelling(add_special=False))
    messages = json.loads(await _read(prefix.messages_file or ""))
    turns = tuple(Message(Role(m["role"]), str(m.get("content") or "")) for m in messages)
    prompt = await service.words.prompt(Conversation(turns, add_generation_prompt=False))
    return prompt.tokens


async def _read(path: str) -> str:
    return await asyncio.to_thread(_text, path)


def _text(path: str) -> str:
    return Path(path).expanduser().read_text()
