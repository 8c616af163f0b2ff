"""What a person can do to a service from the dashboard; footer, palette and help derive from it.

Later deeds (agents, prefixes, model, mode) are further entries of `DEEDS`: a deed names what it
is done to, and needs nothing but a call of the client.
"""

import shlex
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any, Protocol
from urllib.parse import quote

from msgspec import Struct

from mlxstack.client import SlotErased, SlotRestored, SlotSaved
from mlxstack.tui.model import Model
from mlxstack.tui.views.figures import printable, short_time, size, tokens

KEY_VARIABLE = "MLX_STACK_API_KEY"


class Target(StrEnum):
    """What a deed is done to; a screen with such rows offers the deed."""

    SLOT = "slot"
    PREFIX = "prefix"
    AGENT = "agent"
    SERVICE = "service"


class Wants(StrEnum):
    """What is asked for before it is done."""

    NOTHING = "nothing"
    CONSENT = "consent"
    FILENAME = "filename"


class Calls(Protocol):
    """What the deeds need of `mlxstack.client.Client`."""

    url: str

    async def save_slot(self, slot: int, filename: str) -> SlotSaved: ...
    async def restore_slot(self, slot: int, filename: str) -> SlotRestored: ...
    async def erase_slot(self, slot: int) -> SlotErased: ...
    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]: ...
    async def delete(self, path: str) -> None: ...


class Aim(Struct, frozen=True):
    """Which one (the key of its row), and the words that were given."""

    key: str
    words: str = ""


class Hands(Struct, frozen=True):
    """What a deed works with: the service, and the clipboard."""

    calls: Calls
    copy: Callable[[str], None]


class Deed(Struct, frozen=True):
    """`do` returns what happened; it raises StackError or ConnectionError when it went wrong.

    `describe` says in a sentence what will happen to which thing.
    """

    id: str
    key: str
    label: str
    help: str
    target: Target
    wants: Wants
    describe: Callable[[Model, str], str]
    do: Callable[[Hands, Aim], Awaitable[str]]


def deeds_of(targets: frozenset[Target]) -> tuple[Deed, ...]:
    """The deeds of a screen that shows such things, in the order of the footer."""
    return tuple(deed for deed in DEEDS if deed.target in targets)


def deed_of(name: str) -> Deed:
    """The deed of this id."""
    return next(deed for deed in DEEDS if deed.id == name)


def filename_of(model: Model, key: str) -> str:
    """A file name to propose for a slot: its agent's, as far as a file can be called so."""
    agent = next((v.agent for v in model.frame.snapshot.slots if str(v.id) == key), None)
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in agent or "")
    return f"{safe.strip('.-') or f'slot-{key}'}.kv"


async def save(hands: Hands, aim: Aim) -> str:
    """Waits in the service until the slot is idle."""
    done = await hands.calls.save_slot(int(aim.key), aim.words)
    took = short_time(done.timings.get("save_ms", 0.0) / 1000)
    news = f"{size(done.n_written)} written of {size(done.n_bytes)}"
    return f"slot {aim.key}: {done.n_saved} tokens saved to {done.filename}, {news} in {took}"


async def restore(hands: Hands, aim: Aim) -> str:
    """Waits in the service until the slot is idle."""
    done = await hands.calls.restore_slot(int(aim.key), aim.words)
    took = short_time(done.timings.get("restore_ms", 0.0) / 1000)
    news = f"{size(done.n_read)} read in {took}"
    return f"slot {aim.key}: {done.n_restored} tokens restored from {done.filename}, {news}"


async def erase(hands: Hands, aim: Aim) -> str:
    """Waits in the service until the slot is idle."""
    done = await hands.calls.erase_slot(int(aim.key))
    return f"slot {aim.key}: {done.n_erased} tokens erased"


async def copy_curl(hands: Hands, aim: Aim) -> str:
    """The command that saves the slot. A key is never copied: the variable that holds it is."""
    url = shlex.quote(f"{hands.calls.url}/slots/{aim.key}?action=save")
    body = shlex.quote(f'{{"filename": "slot-{aim.key}.kv"}}')
    key = f'-H "Authorization: Bearer ${KEY_VARIABLE}"'
    command = f"curl -sS {url} {key} -d {body}"
    hands.copy(command)
    return f"copied: {command}"


async def unpin(hands: Hands, aim: Aim) -> str:
    """The prefix stays until its room is needed."""
    await hands.calls.delete(f"/cache/prefixes/{quote(aim.key, safe='')}")
    return f"{aim.key} is no longer pinned"


async def clear(hands: Hands, _: Aim) -> str:
    """What is in use or pinned stays."""
    done = await hands.calls.post("/cache/clear", {})
    return f"the cache is cleared: {size(done.get('n_bytes', 0))} freed"


def _parked(model: Model) -> str:
    cache = model.frame.cache
    return size(cache.memory_bytes) if cache else "all"


def _slot(model: Model, key: str) -> str:
    view = next((v for v in model.frame.snapshot.slots if str(v.id) == key), None)
    if view is None:
        return f"slot {key}"
    who = f" of {printable(view.agent, 40)}" if view.agent else ""
    return f"slot {key}{who}, {tokens(view.n_tokens)} tokens"


DEEDS: tuple[Deed, ...] = (
    Deed(
        id="save",
        key="s",
        label="Save",
        help="Write the context of the chosen slot to a slot file.",
        target=Target.SLOT,
        wants=Wants.FILENAME,
        describe=lambda model, key: f"Save {_slot(model, key)} to which file?",
        do=save,
    ),
    Deed(
        id="restore",
        key="r",
        label="Restore",
        help="Replace the context of the chosen slot by the one in a slot file.",
        target=Target.SLOT,
        wants=Wants.FILENAME,
        describe=lambda model, key: f"Replace {_slot(model, key)} by which file?",
        do=restore,
    ),
    Deed(
        id="erase",
        key="e",
        label="Erase",
        help="Empty the chosen slot.",
        target=Target.SLOT,
        wants=Wants.CONSENT,
        describe=lambda model, key: f"Erase {_slot(model, key)}? They must be computed again.",
        do=erase,
    ),
    Deed(
        id="copy_curl",
        key="c",
        label="Copy curl",
        help="Copy the curl command that saves the chosen slot.",
        target=Target.SLOT,
        wants=Wants.NOTHING,
        describe=lambda model, key: f"Copy the curl that saves {_slot(model, key)}.",
        do=copy_curl,
    ),
    Deed(
        id="unpin",
        key="u",
        label="Unpin",
        help="Let go of the chosen pinned prefix: it stays until its room is needed.",
        target=Target.PREFIX,
        wants=Wants.CONSENT,
        describe=lambda _, key: f"Let go of the pinned prefix {printable(key, 60)}?",
        do=unpin,
    ),
    Deed(
        id="clear",
        key="x",
        label="Clear",
        help="Forget all parked KV in memory that is neither in use nor pinned.",
        target=Target.SERVICE,
        wants=Wants.CONSENT,
        describe=lambda model, _: f"Clear the cache? {_parked(model)} are held, live ones stay.",
        do=clear,
    ),
)
