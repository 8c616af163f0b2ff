"""KV routes for peers: match, prefill, file transfer, agent moves."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

from litestar import Response, get, post, put
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath, JSONBody
from litestar.response import Stream
from msgspec import Struct

from mlxstack.api.caller import checked_agent
from mlxstack.api.dialects.native.agents import of_new
from mlxstack.api.disconnect import cancel_on_disconnect
from mlxstack.api.guards import OF_ALL, Connection, key_of
from mlxstack.api.run_generation import AnyRequest, TheService
from mlxstack.core.errors import BadRequest, Forbidden
from mlxstack.features.remote_kv import agent_moves
from mlxstack.features.remote_kv import service as transfer
from mlxstack.features.remote_kv import store as kv_transfer
from mlxstack.features.remote_kv.values import (
    AgentMove,
    KVMatch,
    KVOffer,
    KVQuery,
    MissingKV,
    MovedAgent,
    PeerView,
)

RANGE = re.compile(r"bytes=(\d{1,18})-")


class MoveBody(Struct):
    """POST /v1/agents/{id}/move: `to` is the URL of a peer.

    With `is_kept` the agent stays here too.
    """

    to: str
    is_kept: bool = False


async def all_salts(connection: Connection, _: BaseRouteHandler) -> None:
    """Raise Forbidden for a salted key: files have no tenant."""
    if key_of(connection).salt:
        raise Forbidden(
            "KV is exchanged for all tenants, and this API key has a salt of its own; use a key "
            "without salt and agents (server.api_keys of the preset)"
        )


TRANSFER: dict[str, Any] = {"opt": OF_ALL, "guards": [all_salts]}


@get("/kv/peers", opt=OF_ALL)
async def list_peers(service: TheService) -> tuple[PeerView, ...]:
    """Peers of this service: their state, and what was fetched from them."""
    return transfer.peers_of(service).views()


@post("/kv/match", status_code=200, **TRANSFER)
async def match_kv(service: TheService, data: JSONBody[KVQuery]) -> KVMatch:
    """Cached tokens of a prompt."""
    return await transfer.match(service, data)


@post("/kv/prefill", status_code=200, **TRANSFER)
async def prefill_kv(request: AnyRequest, service: TheService, data: JSONBody[KVQuery]) -> KVOffer:
    """KV files of a prompt, computed first with `is_computed`."""
    return await cancel_on_disconnect(request, transfer.offer(service, data))


@post("/kv/missing", status_code=200, **TRANSFER)
async def missing_kv(service: TheService, data: JSONBody[MissingKV]) -> MissingKV:
    """KV files of this list that are missing here."""
    return await transfer.missing(service, data)


@get("/kv/{identity:str}/{key:str}", **TRANSFER)
async def send_file(
    request: AnyRequest, service: TheService, identity: FromPath[str], key: FromPath[str]
) -> Stream:
    """A KV file, from the byte on that `Range` names."""
    store = transfer.peers_of(service).store
    about = await asyncio.to_thread(kv_transfer.info, store, identity, key)
    etag = f'"{about.checksum}"'
    match = RANGE.fullmatch(request.headers.get("range", ""))
    start = 0
    if match and request.headers.get("if-range", etag) == etag:
        start = int(match[1])
    if start >= about.n_bytes:
        raise BadRequest(f"the file has {about.n_bytes} bytes", "range")

    async def parts() -> AsyncIterator[bytes]:
        for offset in range(start, about.n_bytes, kv_transfer.PART):
            yield await asyncio.to_thread(kv_transfer.read_part, store, identity, key, offset)

    headers = {"etag": etag, "content-length": str(about.n_bytes - start), "accept-ranges": "bytes"}
    if start:
        headers["content-range"] = f"bytes {start}-{about.n_bytes - 1}/{about.n_bytes}"
    return Stream(
        parts(),
        status_code=206 if start else 200,
        headers=headers,
        media_type="application/octet-stream",
    )


@put("/kv/{identity:str}/{key:str}", status_code=204, request_max_body_size=None, **TRANSFER)
async def receive_file(
    request: AnyRequest, service: TheService, identity: FromPath[str], key: FromPath[str]
) -> None:
    """Store a KV file of the served model."""
    length = request.headers.get("content-length", "")
    if not length.isdecimal():
        raise BadRequest("a KV file needs a content-length")
    await transfer.receive(service, (identity, key), int(length), request.stream())


@put("/v1/agents/{agent:str}/kv", status_code=200, **TRANSFER)
async def receive_agent(
    service: TheService, agent: FromPath[str], data: JSONBody[MovedAgent]
) -> Response[KVOffer]:
    """Create an agent of another service from its KV, sent before."""
    n_tokens = await agent_moves.receive(service, checked_agent(agent, "agent"), data)
    return of_new(agent, KVOffer(n_tokens))


@post("/v1/agents/{agent:str}/move", status_code=200, opt=OF_ALL)
async def move_agent(
    service: TheService, agent: FromPath[str], data: JSONBody[MoveBody]
) -> AgentMove:
    """Move an agent with its KV to a peer."""
    return await agent_moves.move(service, agent, data.to, is_kept=data.is_kept)
