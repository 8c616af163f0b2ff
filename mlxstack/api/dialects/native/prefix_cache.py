"""Prefix cache routes: statistics, named prefixes, warming, clearing, misses."""

from functools import partial
from typing import Any

from litestar import delete, get, post
from litestar.params import FromPath, FromQuery, JSONBody
from msgspec import Struct

from mlxstack.api.caller import salt_of
from mlxstack.api.dialects.openai_chat import to_conversation
from mlxstack.api.dialects.openai_chat.messages import ChatMessageParam
from mlxstack.api.dialects.openai_chat.request_schema import ChatBody, ChatToolParam
from mlxstack.api.disconnect import cancel_on_disconnect
from mlxstack.api.guards import OF_ALL, UNLOADED
from mlxstack.api.run_generation import AnyRequest, TheService
from mlxstack.core.commands import CollectGarbage, GCResult
from mlxstack.core.errors import BadRequest, NotFound
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.status import CacheView, RequestView
from mlxstack.service.calls import prefix_cache_admin
from mlxstack.service.calls.prefix_cache_admin import Prefix
from mlxstack.service.parts.text_processor import TextProcessor
from mlxstack.service.service import Service
from mlxstack.text.prompt.prompt import TokenizeOptions


class PrefixBody(Struct):
    """Prefix in one of its forms: `messages`, with tools, or `id`.

    `id` is that of a cached prefix, as in GET /cache.
    """

    name: str = ""
    id: str | None = None
    text: str | None = None
    tokens: list[int] | None = None
    messages: list[ChatMessageParam] | None = None
    tools: list[ChatToolParam] | None = None


@get("/cache", opt=OF_ALL)
async def show_cache(service: TheService, limit: FromQuery[int] = 20) -> CacheView:
    """Budget, entries, hit rates, top prefixes, last misses."""
    return await prefix_cache_admin.look(service, min(max(limit, 1), 1000))


@get("/requests", opt={**OF_ALL, **UNLOADED})
async def list_requests(service: TheService) -> tuple[RequestView, ...]:
    """The last finished requests, the newest first."""
    return service.request_log.requests()


@get("/requests/{name:str}", opt={**OF_ALL, **UNLOADED})
async def show_request(service: TheService, name: FromPath[str]) -> RequestView:
    """Newest request of this id or agent, with its miss reason."""
    view = service.request_log.find(name)
    if view is None:
        raise NotFound(f"no recent request or agent is called {name}")
    return view


@post("/cache/prefixes", status_code=200, opt=OF_ALL)
async def register_prefix(
    request: AnyRequest, service: TheService, data: JSONBody[PrefixBody]
) -> dict[str, Any]:
    """Compute a prefix, or take a cached one; pin it."""
    if data.id is not None:
        _refuse_content(data)
        pinned = await prefix_cache_admin.pin_known(service, data.name, data.id)
    else:
        prefix = await _prefix(request, service, data)
        pinning = prefix_cache_admin.pin(service, data.name, prefix)
        pinned = await cancel_on_disconnect(request, pinning)
    return {"name": pinned.name, "n_tokens": pinned.n_tokens, "n_bytes": pinned.n_bytes}


@delete("/cache/prefixes/{name:str}", status_code=200, opt=OF_ALL)
async def release_prefix(service: TheService, name: FromPath[str]) -> dict[str, str]:
    """Unpin a named prefix."""
    await prefix_cache_admin.unpin(service, name)
    return {"name": name}


@post("/cache/warm", status_code=200, opt=OF_ALL)
async def warm_prefix(
    request: AnyRequest, service: TheService, data: JSONBody[PrefixBody]
) -> dict[str, int]:
    """Compute a prefix without naming it."""
    prefix = await _prefix(request, service, data)
    await cancel_on_disconnect(request, prefix_cache_admin.warm(service, prefix))
    return {"n_tokens": len(prefix.prompt.tokens)}


@post("/cache/clear", status_code=200, opt=OF_ALL)
async def clear_cache(service: TheService) -> dict[str, int]:
    """Drop parked KV that is neither in use nor pinned."""
    return {"n_bytes": (await prefix_cache_admin.clear(service)).n_bytes}


@post("/cache/gc", status_code=200, opt=OF_ALL)
async def sweep_disk(service: TheService, data: JSONBody[CollectGarbage]) -> GCResult:
    """Delete stored KV by age and bytes; scope "all" includes saved contexts."""
    return await prefix_cache_admin.sweep(service, data)


def _refuse_content(data: PrefixBody) -> None:
    if any(x is not None for x in (data.text, data.tokens, data.messages)):
        raise BadRequest("give either the id of a kept prefix or its content", "id")


async def _prefix(request: AnyRequest, service: Service, data: PrefixBody) -> Prefix:
    text_processor = service.text_processor
    prompt = await _prompt(text_processor, data)
    if not prompt.tokens:
        raise BadRequest("the prefix is empty; at least one token is needed")
    return Prefix(prompt, text_processor, salt_of(request))


async def _prompt(text_processor: TextProcessor, data: PrefixBody) -> PromptTokens:
    sources = [source for source in (data.text, data.tokens, data.messages) if source is not None]
    if len(sources) != 1:
        raise BadRequest("give exactly one of text, tokens and messages", "text")
    if data.tokens is not None:
        text_processor.check(data.tokens, "tokens")
        return PromptTokens(tuple(data.tokens))
    if data.text is not None:
        options = TokenizeOptions(add_special=False)
        return PromptTokens(await text_processor.tokenize(data.text, options))
    body = ChatBody(messages=data.messages or [], tools=data.tools, add_generation_prompt=False)
    conversation = await text_processor.read(partial(to_conversation.conversation, body))
    return await text_processor.prompt(conversation)
