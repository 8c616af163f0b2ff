"""Names of presets, services and agents, which a shell completes."""

import os
from typing import Any

import typer

QUICK_S = 3.0


def preset_names() -> list[str]:
    """All presets."""
    from mlxstack.config.presets import listed
    from mlxstack.host.home import home_from

    return sorted(listed(home_from(os.environ)))


def service_names() -> list[str]:
    """Services of this home."""
    from mlxstack.host import services
    from mlxstack.host.home import home_from

    return services.names(home_from(os.environ))


def agent_names() -> list[str]:
    """Ids of agents in running services; errors yield none."""
    import asyncio

    from mlxstack.host import services
    from mlxstack.host.home import home_from

    async def all_of(names: list[str]) -> list[list[str]]:
        return await asyncio.gather(*(_agents_of(name) for name in names))

    names = [state.plan.name for state in services.running(home_from(os.environ))]
    return sorted({agent for agents in asyncio.run(all_of(names)) for agent in agents})


async def _agents_of(name: str) -> list[str]:
    from mlxstack.cli.exit_codes import Misuse
    from mlxstack.cli.target import target
    from mlxstack.client.client import Client
    from mlxstack.core.errors import StackError
    from mlxstack.host.home import home_from

    try:
        where = target(home_from(os.environ), name, None)
        async with Client(where.url, where.api_key, QUICK_S) as client:
            listed: dict[str, Any] = await client.get("/v1/agents", dict[str, Any])
    except (Misuse, StackError, ConnectionError):
        return []
    return [one["id"] for one in listed["data"]]


def preset_argument(text: str, metavar: str | None = None) -> Any:
    """Argument of a preset or model."""
    return typer.Argument(metavar=metavar, help=text, autocompletion=preset_names)


def service_argument(text: str) -> Any:
    """Argument of a service of this home."""
    return typer.Argument(help=text, autocompletion=service_names)


def service_option(text: str) -> Any:
    """The option `--name` of a service of this home."""
    return typer.Option("--name", help=text, autocompletion=service_names)
