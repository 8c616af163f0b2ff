"""Dashboard or text pages of a running service."""

import shutil
from contextlib import nullcontext
from pathlib import Path

from msgspec import Struct

from mlxstack.cli.output import say
from mlxstack.cli.target import ServiceTarget
from mlxstack.client.client import Client
from mlxstack.tui.actions.action import LocalActions
from mlxstack.tui.app import Dashboard
from mlxstack.tui.feed import Feed, LiveFeed
from mlxstack.tui.recording import RecordingWriter, new_recording
from mlxstack.tui.text_pages import pages
from mlxstack.tui.theme import ThemeChoice

MAX_S = 7200.0
"""A model may have to be fetched before it can be changed."""


class Setting(Struct, frozen=True):
    """Theme, local actions (None for a remote service), keys by binding."""

    look: ThemeChoice
    machine: LocalActions | None
    keymap: dict[str, str] = {}


async def attach(where: ServiceTarget, record: Path | None, setting: Setting) -> int:
    """Run the dashboard until the user quits; the exit code."""
    async with Client(where.url, where.api_key, MAX_S, where.member) as client:
        live: Feed = LiveFeed(client)
        with new_recording(record) if record else nullcontext() as file:
            feed = RecordingWriter(live, file) if file else live
            app = Dashboard(feed, client, setting.look, setting.machine, setting.keymap)
            await app.run_async()
        return app.return_code or 0


async def print_pages(where: ServiceTarget, every_s: float) -> None:
    """Print a page every `every_s` seconds, without end."""
    width = shutil.get_terminal_size((120, 40)).columns
    async with Client(where.url, where.api_key, member=where.member) as client:
        async for page in pages(LiveFeed(client), width, every_s):
            say(f"{page}\n")
