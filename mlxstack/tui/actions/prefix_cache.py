"""Actions on the prefix cache: warm, pin, unpin, clear."""

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from mlxstack.core.errors import BadRequest
from mlxstack.core.formatting import printable, size
from mlxstack.tui.actions.action import Action, ActionContext, ActionInput, ActionTarget, Aim
from mlxstack.tui.state import DashboardState
from mlxstack.tui.views.formatting import tokens


async def pin(context: ActionContext, aim: Aim) -> str:
    """Pin a listed prefix under a name."""
    done = await context.calls.post("/cache/prefixes", {"name": aim.text, "id": aim.key})
    return f"{aim.text}: {done.get('n_tokens', 0)} tokens are pinned"


async def unpin(context: ActionContext, aim: Aim) -> str:
    """Make the prefix evictable again."""
    await context.calls.delete(f"/cache/prefixes/{quote(aim.key, safe='')}")
    return f"{aim.key} is no longer pinned"


async def warm(context: ActionContext, aim: Aim) -> str:
    """Prefill a file at low priority, then pin it by name."""
    body = await asyncio.to_thread(_prefix, aim.text)
    done = await context.calls.post("/cache/prefixes", body)
    return f"{body['name']}: {done.get('n_tokens', 0)} tokens are pinned"


async def clear(context: ActionContext, _: Aim) -> str:
    """Evict all KV that is neither in use nor pinned."""
    done = await context.calls.post("/cache/clear", {})
    return f"the cache is cleared: {size(done.get('n_bytes', 0))} freed"


def _prefix(path: str) -> dict[str, Any]:
    """Read a chat (JSON) or text. Raises BadRequest if unreadable."""
    file = Path(path)
    try:
        file = file.expanduser()
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            return {"name": file.stem, "messages": msgspec.json.decode(text)}
        return {"name": file.stem, "text": text}
    except (OSError, ValueError, RuntimeError) as why:
        raise BadRequest(f"{file} cannot be read: {why}") from why


def _told(model: DashboardState, key: str) -> str:
    cache = model.frame.cache
    one = next((view for view in cache.prefixes if view.id == key), None) if cache else None
    if one is None:
        return printable(key, 60)
    return f"{printable(one.name, 60) or 'the unnamed prefix'} ({tokens(one.n_tokens)} tokens)"


def _parked(model: DashboardState) -> str:
    cache = model.frame.cache
    return size(cache.memory_bytes) if cache else "all"


ACTIONS: tuple[Action, ...] = (
    Action(
        id="pin",
        key="i",
        label="Pin",
        help="Pin the chosen prefix under a name, exempt from eviction.",
        target=ActionTarget.PREFIX,
        wants=ActionInput.NAME,
        describe=lambda model, key: f"Pin {_told(model, key)} under which name?",
        do=pin,
    ),
    Action(
        id="unpin",
        key="u",
        label="Unpin",
        help="Make the chosen pinned prefix evictable again.",
        target=ActionTarget.PREFIX,
        describe=lambda model, key: f"Unpin {_told(model, key)}? It can be evicted then.",
        do=unpin,
    ),
    Action(
        id="warm",
        key="w",
        label="Warm",
        help="Prefill a file (text, or messages in .json) and pin it under its name.",
        target=ActionTarget.CACHE,
        wants=ActionInput.FILE,
        describe=lambda *_: "Prefill and pin which file of this computer? .json: a chat.",
        do=warm,
    ),
    Action(
        id="clear",
        key="X",
        label="Clear",
        help="Evict all parked KV that is neither in use nor pinned.",
        target=ActionTarget.CACHE,
        describe=lambda model, _: (
            f"Clear the cache? {_parked(model)} are held; live contexts stay."
        ),
        is_destructive=True,
        do=clear,
    ),
)
