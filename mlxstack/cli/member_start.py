"""Start of a gateway's member for a command that needs its model."""

import asyncio
from typing import Any

from mlxstack.cli.output import note
from mlxstack.cli.target import ServiceTarget
from mlxstack.client import Client

LONGEST_S = 7200.0
"""A model may have to be downloaded before it is loaded."""

LOADED = "loaded"


def start_member(where: ServiceTarget) -> None:
    """Load the target's member, and wait for it; no effect without one.

    Raises what the gateway answers where it cannot be started.
    """
    if where.member is not None:
        asyncio.run(_start(where, where.member))


async def _start(where: ServiceTarget, member: str) -> None:
    async with Client(where.url, where.api_key, LONGEST_S) as client:
        health = await client.get("/health", dict[str, Any])
        if health.get("members", {}).get(member) != LOADED:
            note(f"starting {member} ...")
            await client.post("/v1/models/load", {"model": member})
