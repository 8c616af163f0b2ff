"""The structure of an action: target, input, description, call."""

from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any, Protocol

from msgspec import Struct

from mlxstack.tui.state import DashboardState


class ActionTarget(StrEnum):
    """Target of an action; screens with such targets offer it."""

    SLOT = "slot"
    PREFIX = "prefix"
    AGENT = "agent"
    CACHE = "cache"
    SERVICE = "service"
    MODEL = "model"
    MACHINE = "machine"


class ActionInput(StrEnum):
    """The input an action asks for first."""

    NOTHING = "nothing"
    CONSENT = "consent"
    PRIORITY = "priority"
    FILENAME = "filename"
    FILE = "file"
    NAME = "name"
    PRESET = "preset"
    MODE = "mode"


class ServiceCalls(Protocol):
    """The calls of `mlxstack.client.client.Client` that actions use."""

    url: str

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]: ...
    async def delete(self, path: str) -> dict[str, Any]: ...


class LocalActions(Struct, frozen=True):
    """Actions on the service's own computer, and its presets and modes.

    `describe` returns presets with size, fit and download state, which takes seconds; `log` the
    last lines of the service's log; `switch_mode` the services that it stopped and started, or it
    raises StackError.
    """

    presets: tuple[str, ...]
    modes: tuple[str, ...]
    describe: Callable[[tuple[str, ...]], dict[str, str]]
    log: Callable[[], list[str]]
    switch_mode: Callable[[str], Awaitable[str]]


class Aim(Struct, frozen=True):
    """The row key of the target, and the text that was typed."""

    key: str
    text: str = ""


class ActionContext(Struct, frozen=True):
    """Clients of an action: service, clipboard, and local machine if any."""

    calls: ServiceCalls
    copy: Callable[[str], None]
    machine: LocalActions | None = None


Do = Callable[[ActionContext, Aim], Awaitable[str]]
Describe = Callable[[DashboardState, str], str]


class Action(Struct, frozen=True):
    """Action; `do` returns its outcome, or raises.

    `describe` says in a sentence what will happen to which thing. The key of a destructive action
    is a capital that the footer does not show; the palette lists all of them, by `title` where the
    label is too short to be found.
    """

    id: str
    key: str
    label: str
    help: str
    target: ActionTarget
    describe: Describe
    do: Do
    wants: ActionInput = ActionInput.CONSENT
    is_destructive: bool = False
    title: str = ""


def action(
    target: ActionTarget, name_of: Describe, key: str, label: str, question: str, **more: Any
) -> Callable[[Do], Action]:
    """Make a function an action.

    Its name is the id, its docstring the help. In the question `{}` is the thing, as `name_of`
    says it.
    """

    def decorator(do: Do) -> Action:
        help_text = " ".join((do.__doc__ or "").split())

        def describe(model: DashboardState, thing: str) -> str:
            return question.format(name_of(model, thing))

        return Action(do.__name__, key, label, help_text, target, describe, do, **more)

    return decorator
