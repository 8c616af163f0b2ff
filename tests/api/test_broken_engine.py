"""A service that cannot answer any more says so, and ends to be started again."""

import asyncio
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from msgspec import Struct

from mlxstack.api.server import UvicornServer, config, serve
from mlxstack.core.preset import ServerSpec
from mlxstack.service.service import Service
from tests.api.running import standing
from tests.api.test_swap import until
from tests.patience import PATIENCE_S
from tests.service.standin import FACTS, StandIn

pytestmark = pytest.mark.net


class Stage(Struct):
    """A loaded service whose end can be awaited."""

    service: Service
    engine: StandIn
    server: UvicornServer
    leaving: asyncio.Event
    end: "asyncio.Task[int]"
    url: str


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    service, engine = standing(ServerSpec(port=0))
    engine.loading.set_result(FACTS)
    server = UvicornServer(config(service))
    leaving = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        end = asyncio.create_task(serve(service, server, listener, leaving))
        await until(lambda: server.started and service.health == "ok")
        yield Stage(service, engine, server, leaving, end, url)
        leaving.set()
        await end


async def code(stage: Stage) -> int:
    return await asyncio.wait_for(asyncio.shield(stage.end), PATIENCE_S)


async def test_a9_a_dead_engine_ends_the_service_at_once(stage: Stage) -> None:
    stage.engine.script = None
    async with httpx.AsyncClient(base_url=stage.url, timeout=PATIENCE_S) as http:
        asking = asyncio.create_task(http.post("/completion", json={"prompt": "hello"}))
        await until(lambda: stage.engine.asked)
        stage.engine.is_dead = True
        answer = await asking
    assert answer.status_code == 500
    assert "thread has died" in answer.text
    assert await code(stage) == 1


async def test_a9_a_service_without_any_model_ends(stage: Stage) -> None:
    stage.service.give_up("neither model can be loaded")
    assert await code(stage) == 1


async def test_a9_health_says_in_503_what_is_the_trouble(stage: Stage) -> None:
    async with httpx.AsyncClient(base_url=stage.url, timeout=PATIENCE_S) as http:
        assert (await http.get("/health")).status_code == 200
        # What waits for the end of the service is not woken before the answer is there.
        stage.service.died = asyncio.Event()
        stage.service.give_up("the engine's thread has died")
        answer = await http.get("/health")
    assert answer.status_code == 503
    assert "thread has died" in answer.json()["error"]["message"]


async def test_a_web_server_that_ends_by_itself_is_a_failure(stage: Stage) -> None:
    stage.server.should_exit = True
    assert await code(stage) == 1


async def test_a_service_that_was_asked_to_leave_ends_well(stage: Stage) -> None:
    stage.leaving.set()
    assert await code(stage) == 0
