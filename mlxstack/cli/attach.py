"""Attaches to a running service and shows it: on the dashboard, or as pages of text."""

import shutil
from contextlib import nullcontext
from pathlib import Path

import typer
from msgspec import Struct

from mlxstack.cli.here import Here
from mlxstack.cli.target import Target
from mlxstack.client import Client
from mlxstack.tui.app import Dashboard
from mlxstack.tui.feed import Feed, LiveFeed
from mlxstack.tui.plain import pages
from mlxstack.tui.tape import Recording, new_tape
from mlxstack.tui.theme import Look

LONGEST_S = 7200.0
"""A model may have to be fetched before it can be changed."""


class Setting(Struct, frozen=True):
    """How it looks, and the computer it may change; None when the service runs elsewhere."""

    look: Look
    machine: Here | None


async def attach(where: Target, record: Path | None, setting: Setting) -> int:
    """Run the dashboard on a service until it is left; the exit code."""
    async with Client(where.url, where.api_key, LONGEST_S) as client:
        live: Feed = LiveFeed(client)
        with new_tape(record) if record else nullcontext() as file:
            feed = Recording(live, file) if file else live
            app = Dashboard(feed, client, setting.look, setting.machine)
            await app.run_async()
        return app.return_code or 0


async def print_pages(where: Target, every_s: float) -> None:
    """Print a page every `every_s` seconds, for ever."""
    width = shutil.get_terminal_size((120, 40)).columns
    async with Client(where.url, where.api_key) as client:
        async for page in pages(LiveFeed(client), width, every_s):
            typer.echo(f"{page}\n")
