"""Names of presets, services, tiers and agents, which a shell completes."""

import os
from contextlib import suppress
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


def tier_names() -> list[str]:
    """Tiers of an API key."""
    from mlxstack.core.preset import Tier

    return [tier.value for tier in Tier]


def agent_names() -> list[str]:
    """Ids of agents in running services; errors yield none."""
    from concurrent.futures import ThreadPoolExecutor

    from mlxstack.cli.exit_codes import Misuse
    from mlxstack.cli.target import target
    from mlxstack.core.errors import StackError
    from mlxstack.host import services
    from mlxstack.host.home import home_from

    home = home_from(os.environ)

    async def agents(client: Any) -> list[dict[str, Any]]:
        return list((await client.get("/v1/agents", dict[str, Any]))["data"])

    def of(state: services.ServiceState) -> list[dict[str, Any]]:
        with suppress(Misuse, StackError, ConnectionError):
            return target(home, state.spec.name, None).ask(agents, timeout_s=QUICK_S)
        return []

    with ThreadPoolExecutor() as pool:
        listings = pool.map(of, services.running(home))
        return sorted({agent["id"] for listed in listings for agent in listed})


def preset_argument(text: str, metavar: str | None = None) -> Any:
    return typer.Argument(metavar=metavar, help=text, autocompletion=preset_names)


def service_argument(text: str) -> Any:
    return typer.Argument(help=text, autocompletion=service_names)


def service_option(text: str) -> Any:
    """The option `--name` of a service of this home."""
    return typer.Option("--name", help=text, autocompletion=service_names)
