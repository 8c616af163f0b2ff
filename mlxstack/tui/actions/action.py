"""What a deed is: something a person does to a service, after being asked."""

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any, Protocol

from msgspec import Struct

from mlxstack.client import SlotErased, SlotRestored, SlotSaved
from mlxstack.tui.state import DashboardState


class ActionTarget(StrEnum):
    """What a deed is done to; a screen with such things offers the deed."""

    SLOT = "slot"
    PREFIX = "prefix"
    AGENT = "agent"
    CACHE = "cache"
    SERVICE = "service"
    MACHINE = "machine"


class ActionInput(StrEnum):
    """What is asked for before it is done."""

    NOTHING = "nothing"
    CONSENT = "consent"
    PRIORITY = "priority"
    FILENAME = "filename"
    FILE = "file"
    NAME = "name"
    PRESET = "preset"
    MODE = "mode"


class ServiceCalls(Protocol):
    """What the deeds need of `mlxstack.client.Client`."""

    url: str

    async def save_slot(self, slot: int, filename: str) -> SlotSaved: ...
    async def restore_slot(self, slot: int, filename: str) -> SlotRestored: ...
    async def erase_slot(self, slot: int) -> SlotErased: ...
    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]: ...
    async def delete(self, path: str) -> dict[str, Any]: ...


class LocalMachine(Protocol):
    """The computer of the service, where the dashboard runs on it too: its presets and modes."""

    @property
    def presets(self) -> tuple[str, ...]:
        """Their names."""
        ...

    @property
    def modes(self) -> tuple[str, ...]:
        """Their names."""
        ...

    async def switch_mode(self, mode: str) -> str:
        """What was stopped and started. Raises StackError when nothing was."""
        ...


class Aim(Struct, frozen=True):
    """Which one (the key of its row), and the words that were given."""

    key: str
    words: str = ""


class ActionContext(Struct, frozen=True):
    """What a deed works with: the service, its computer if it is this one, and the clipboard."""

    calls: ServiceCalls
    copy: Callable[[str], None]
    machine: LocalMachine | None = None


class Action(Struct, frozen=True):
    """`do` returns what happened; it raises StackError or ConnectionError when it went wrong.

    `describe` says in a sentence what will happen to which thing.
    """

    id: str
    key: str
    label: str
    help: str
    target: ActionTarget
    wants: ActionInput
    describe: Callable[[DashboardState, str], str]
    do: Callable[[ActionContext, Aim], Awaitable[str]]
