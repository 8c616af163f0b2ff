"""Heads of clients: computed before their first message."""

from litestar import post
from litestar.params import JSONBody
from msgspec import Struct

from mlxstack.api.caller import salt_of
from mlxstack.api.run_generation import AnyRequest, TheService
from mlxstack.features.heads.policy import HeadKey
from mlxstack.features.heads.service import ClientHeads


class HeadBody(Struct):
    """Client that starts, as in `mlx-stack run`."""

    client: str
    version: str = ""
    folder: str = ""


class HeadStarted(Struct, frozen=True):
    """Whether a head of the client is known, and computed now."""

    is_known: bool


@post("/heads", status_code=202)
async def prepare_head(
    request: AnyRequest, service: TheService, data: JSONBody[HeadBody]
) -> HeadStarted:
    """Compute the last head of a client in the background."""
    feature = service.feature(ClientHeads)
    key = HeadKey(data.client, data.version, data.folder, salt_of(request))
    return HeadStarted(feature is not None and feature.begin(key))
