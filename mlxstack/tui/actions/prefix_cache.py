"""Actions on the prefix cache: warm, pin, unpin, clear."""

import asyncio
from functools import partial
from pathlib import Path
from urllib.parse import quote

from mlxstack.client.prefix_file import prefix_in
from mlxstack.core.formatting import count, printable, size
from mlxstack.tui.actions.action import ActionContext, ActionInput, ActionTarget, Aim, action
from mlxstack.tui.state import DashboardState


def _prefix(model: DashboardState, key: str) -> str:
    prefixes = model.frame.cache.prefixes if model.frame.cache else ()
    for prefix in prefixes:
        if prefix.id == key:
            name = printable(prefix.name, 60) or "the unnamed prefix"
            return f"{name} ({count(prefix.n_tokens)} tokens)"
    return printable(key, 60)


def _parked(model: DashboardState, _: str) -> str:
    cache = model.frame.cache
    return size(cache.memory_bytes) if cache else "all"


on_prefix = partial(action, ActionTarget.PREFIX, _prefix)
on_cache = partial(action, ActionTarget.CACHE, _parked)


@on_prefix("i", "Pin", "Pin {} under which name?", wants=ActionInput.NAME)
async def pin(context: ActionContext, aim: Aim) -> str:
    """Pin the chosen prefix under a name, exempt from eviction."""
    done = await context.calls.post("/cache/prefixes", {"name": aim.text, "id": aim.key})
    return f"{aim.text}: {done.get('n_tokens', 0)} tokens are pinned"


@on_prefix("u", "Unpin", "Unpin {}? It can be evicted then.")
async def unpin(context: ActionContext, aim: Aim) -> str:
    """Make the chosen pinned prefix evictable again."""
    await context.calls.delete(f"/cache/prefixes/{quote(aim.key, safe='')}")
    return f"{aim.key} is no longer pinned"


@on_cache(
    "w",
    "Warm",
    "Prefill and pin which file of this computer? .json: a chat.",
    wants=ActionInput.FILE,
)
async def warm(context: ActionContext, aim: Aim) -> str:
    """Prefill a file (text, or messages in .json) and pin it under its name."""
    body = await asyncio.to_thread(prefix_in, Path(aim.text))
    name = Path(aim.text).stem
    done = await context.calls.post("/cache/prefixes", body | {"name": name})
    return f"{name}: {done.get('n_tokens', 0)} tokens are pinned"


@on_cache("X", "Clear", "Clear the cache? {} are held; live contexts stay.", is_destructive=True)
async def clear(context: ActionContext, _: Aim) -> str:
    """Evict all parked KV that is neither in use nor pinned."""
    done = await context.calls.post("/cache/clear", {})
    return f"the cache is cleared: {size(done.get('n_bytes', 0))} freed"


ACTIONS = (pin, unpin, warm, clear)
