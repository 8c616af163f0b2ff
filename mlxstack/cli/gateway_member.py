"""Start of a gateway's member for a command that needs its model."""

from typing import Any

from mlxstack.cli.output import note
from mlxstack.cli.target import ServiceTarget

MAX_S = 7200.0
"""A model may have to be downloaded before it is loaded."""

LOADED = "loaded"


def start_member(where: ServiceTarget) -> None:
    """Load the target's member, and wait for it; no effect without one.

    Raises what the gateway answers where it cannot be started.
    """
    member = where.member
    if member is None:
        return
    health = where.ask(lambda client: client.get("/health", dict[str, Any]))
    if health.get("members", {}).get(member) != LOADED:
        note(f"starting {member} ...")
        body = {"model": member}
        where.ask(lambda client: client.post("/v1/models/load", body), timeout_s=MAX_S)
