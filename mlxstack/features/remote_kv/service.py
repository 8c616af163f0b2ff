"""KV transfer: the service side of `/kv`, for peers."""

import asyncio
from collections.abc import AsyncIterator

from mlxstack.core.errors import BadRequest, Conflict, TooLong, Unsupported
from mlxstack.core.interfaces import Manifest
from mlxstack.core.preset import ServiceKind
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.features.remote_kv.peers import Peers
from mlxstack.features.remote_kv.store import IncomingKVFile
from mlxstack.features.remote_kv.values import KVMatch, KVOffer, KVQuery, MissingKV
from mlxstack.service.calls import prefix_cache_admin
from mlxstack.service.calls.prefix_cache_admin import Prefix
from mlxstack.service.parts.agent_store import in_thread
from mlxstack.service.parts.stats import n_processing, prefill_speed
from mlxstack.service.service import Service

MAX_FILE_BYTES = 8 << 30


def peers_of(service: Service) -> Peers:
    """Peers of a service. Raises as `Service.require`, and Unsupported."""
    service.require()
    peers = service.feature(Peers)
    if peers is None or service.preset.kind is ServiceKind.EMBEDDING or service.preset.hosts:
        raise Unsupported("this service exchanges no KV with others")
    return peers


async def match(service: Service, query: KVQuery) -> KVMatch:
    """Cached tokens of a prompt, and the prefill speed for the rest.

    Raises Conflict.
    """
    _check(service, query)
    matching = service.generator.match_kv(PromptTokens(query.tokens), query.salt)
    snapshot = service.snapshot()
    is_idle = not snapshot.waiting and n_processing(snapshot) < len(snapshot.slots)
    n_tokens = await asyncio.wrap_future(matching)
    return KVMatch(n_tokens, prefill_speed(snapshot.counters), is_idle)


async def offer(service: Service, query: KVQuery) -> KVOffer:
    """Write a prompt's KV to disk for a peer, computed if requested.

    Raises Conflict for another model, BadRequest, Busy, Unsupported.
    """
    _check(service, query)
    if query.is_computed:
        positions = tuple(
            position for position in query.checkpoint_positions if 0 < position < len(query.tokens)
        )
        text_processor = service.text_processor
        prompt = PromptTokens(query.tokens, checkpoint_positions=positions)
        prefix = Prefix(prompt, text_processor, query.salt, is_for_peer=True)
        await prefix_cache_admin.warm(service, prefix)
    exporting = service.generator.export_kv(PromptTokens(query.tokens), query.salt)
    manifest: Manifest = await asyncio.wrap_future(exporting)
    return KVOffer(len(manifest.tokens), manifest.segments, manifest.checkpoints, manifest.n_bytes)


async def missing(service: Service, query: MissingKV) -> MissingKV:
    """Keys of `names` without a file here. Raises Conflict for another model."""
    check_identity(service, query.identity)
    store = peers_of(service).store

    def look() -> tuple[str, ...]:
        return tuple(key for key in query.keys if not store.has(query.identity, key))

    return MissingKV(query.identity, await asyncio.to_thread(look))


async def receive(
    service: Service, name: tuple[str, str], n_bytes: int, parts: AsyncIterator[bytes]
) -> None:
    """Store a file of `n_bytes` by its identity and key, verified.

    Raises Conflict for another model, DiskFull, Damaged, NotFound for an impossible key.
    """
    check_identity(service, name[0])
    if not 0 < n_bytes <= MAX_FILE_BYTES:
        raise BadRequest("a KV file needs a content-length of 1 byte to 8 GiB")
    await asyncio.wrap_future(service.generator.reserve_disk(n_bytes))
    with await in_thread(IncomingKVFile, peers_of(service).store, *name, n_bytes) as incoming:
        async for part in parts:
            await in_thread(incoming.write, part)
        await in_thread(incoming.finish)


def check_identity(service: Service, identity: str) -> None:
    """Raises Conflict unless KV of this identity is used here."""
    if identity != service.facts.identity.key():
        raise Conflict(
            f"{service.name} is served here, and the KV is of another model, adapter, KV "
            "precision or version of mlx-lm; start the same preset on both services"
        )


def _check(service: Service, query: KVQuery) -> None:
    check_identity(service, query.identity)
    if not query.tokens:
        raise BadRequest("a prompt has at least one token", "tokens")
    if len(query.tokens) >= service.n_ctx:
        raise TooLong(len(query.tokens), service.n_ctx)
    service.text_processor.check(query.tokens, "tokens")
