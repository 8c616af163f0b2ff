"""Requests that wait for a member get heartbeats in their dialect, then its answer."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from mlxstack.api import swap_middleware
from mlxstack.api.listener import bind
from mlxstack.core.preset import ServerSpec
from tests import patience
from tests.api.running import serving, standing
from tests.gateway.gateway_thread import behind, in_front
from tests.patience import PATIENCE_S
from tests.service.standin import FACTS

pytestmark = pytest.mark.net

SAID = [{"role": "user", "content": "hello"}]
CHAT = {"messages": SAID, "max_tokens": 4, "stream": True}
STREAMS = {
    "/v1/chat/completions": (CHAT, ": keepalive", "data: [DONE]"),
    "/v1/completions": ({"prompt": "hello", "stream": True}, ": keepalive", "data: [DONE]"),
    "/v1/responses": ({"input": "hello", "stream": True}, ": keepalive", "response.completed"),
    "/v1/messages": (CHAT, "event: ping", "event: message_stop"),
    "/completion": ({"prompt": "hello", "stream": True}, ": keepalive", '"stop":true'),
    "/api/chat": ({"messages": SAID}, " ", '"done":true'),
    "/api/generate": ({"prompt": "hello"}, " ", '"done":true'),
}


def test_each_dialect_gets_its_heartbeats_then_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_middleware, "FIRST_S", 0.01)
    monkeypatch.setattr(swap_middleware, "BEAT_S", 0.01)
    spec = ServerSpec(port=0, drain_s=1)
    inner = behind(spec)
    service, engine = standing(inner)

    texts: dict[str, str] = dict.fromkeys(STREAMS, "")

    async def stream(http: httpx.AsyncClient, path: str) -> int:
        async with http.stream("POST", path, json=STREAMS[path][0]) as answer:
            async for piece in answer.aiter_text():
                texts[path] += piece
            return answer.status_code

    async def scene(url: str) -> tuple[dict[str, int], httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            async with asyncio.TaskGroup() as group:
                asked = {path: group.create_task(stream(http, path)) for path in STREAMS}
                whole = group.create_task(http.post("/api/show", json={"model": "standin"}))
                plain = group.create_task(
                    http.post("/v1/chat/completions", json={**CHAT, "stream": False})
                )
                await patience.until(lambda: front.member.n_waiting == len(STREAMS) + 1)
                await patience.until(
                    lambda: all(
                        texts[path].count(beat) > 2 for path, (_, beat, _) in STREAMS.items()
                    )
                )
                assert not plain.done()
                assert (await whole).status_code == 503, "a question about it does not wait"
                engine.loading.set_result(FACTS)
            return {path: task.result() for path, task in asked.items()}, plain.result()

    with (
        bind(inner) as listener,
        serving(service, listener, is_loaded=False) as member,
        in_front(spec, member.url, "standin", tmp_path, is_loaded=False) as front,
    ):
        streamed, plain = asyncio.run(scene(front.url))
    assert plain.status_code == 200 and plain.json()["choices"]
    for path, (_, beat, last) in STREAMS.items():
        assert streamed[path] == 200, texts[path]
        assert texts[path].startswith(beat), path
        assert last in texts[path], path
    for path in ("/api/chat", "/api/generate"):
        assert json.loads(texts[path].strip().splitlines()[-1])["done"] is True
