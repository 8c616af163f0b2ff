"""Names of services and agents, for the completion of a shell."""

import os
from typing import Any

QUICK_S = 3.0


def service_names(incomplete: str) -> list[str]:
    """Services of this home whose names begin so."""
    from mlxstack.host import services
    from mlxstack.host.home import home_from

    return [name for name in services.names(home_from(os.environ)) if name.startswith(incomplete)]


def agent_names(incomplete: str) -> list[str]:
    """Ids of agents in running services, by prefix; errors yield none."""
    import asyncio

    from mlxstack.host import services
    from mlxstack.host.home import home_from

    async def all_of(names: list[str]) -> list[list[str]]:
        return await asyncio.gather(*(_agents_of(name) for name in names))

    names = [state.plan.name for state in services.running(home_from(os.environ))]
    found = {agent for agents in asyncio.run(all_of(names)) for agent in agents}
    return sorted(agent for agent in found if agent.startswith(incomplete))


async def _agents_of(name: str) -> list[str]:
    from mlxstack.cli.exit_codes import Misuse
    from mlxstack.cli.target import target
    from mlxstack.client import Client
    from mlxstack.core.errors import StackError
    from mlxstack.host.home import home_from

    try:
        where = target(home_from(os.environ), name, None)
        async with Client(where.url, where.api_key, QUICK_S) as client:
            listed: dict[str, Any] = await client.get("/v1/agents", dict[str, Any])
    except (Misuse, StackError, ConnectionError):
        return []
    return [one["id"] for one in listed["data"]]
