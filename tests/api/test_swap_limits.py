"""A change of models has limits of time, a way back, and says where it is."""

import asyncio
import os
import shutil
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import Struct

from mlxstack.api.dialects.openai_chat.messages import read_message_file
from mlxstack.api.server import UvicornServer, config, serve
from mlxstack.core.preset import ServerSpec, SlotSpec
from mlxstack.engine import template_check
from mlxstack.engine.loading import loader
from mlxstack.service import service as services
from mlxstack.service.assembly import assemble
from mlxstack.service.calls import model_swap
from mlxstack.service.service import Service
from tests import models
from tests.api.running import TINY, tiny_preset
from tests.patience import PATIENCE_S, until

pytestmark = [pytest.mark.mlx, pytest.mark.net]

LIMIT_S = 6.0
ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
TURN = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


class Stage(Struct):
    """A service whose end can be awaited; `home` holds presets of other models."""

    service: Service
    end: "asyncio.Task[int]"
    http: httpx.AsyncClient
    home: Path


@pytest.fixture
async def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stage]:
    """Model a, beside `loop`, whose template never ends, and `stalled`, whose disk never does."""
    one, loop, adapter = (tmp_path / name for name in ("a", "loop", "adapter"))
    models.write(one, TINY, seed=1)
    shutil.copytree(one, loop)
    (loop / "chat_template.jinja").write_text(ENDLESS)
    # To open a pipe is to wait for its writer, as for a disk that does not answer. The check that
    # reads first refuses pipes, so that here it is the one which waits.
    adapter.mkdir()
    pipe = adapter / "adapter_config.json"
    os.mkfifo(pipe)
    monkeypatch.setattr(loader, "check_adapter", lambda _: pipe.read_text())
    (tmp_path / "presets").mkdir()
    for name, model in (("loop", loop), ("stalled", f"{one}, adapter: {adapter}")):
        text = f"model: {{id: {model}, alias: model-{name}}}\n"
        (tmp_path / "presets" / f"{name}.yaml").write_text(text)
    server = ServerSpec(port=0, drain_s=0.3, startup_timeout_s=LIMIT_S)
    preset = tiny_preset(one, slots=SlotSpec(count=1, n_ctx=512), server=server)
    service = assemble(preset, tmp_path, read_message_file)
    leaving = asyncio.Event()
    web = UvicornServer(config(service))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        end = asyncio.create_task(serve(service, web, listener, leaving))
        await until(lambda: web.started and service.health == "ok")
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            yield Stage(service, end, http, tmp_path)
        leaving.set()
        await end


def change(stage: Stage, preset: str) -> "asyncio.Task[httpx.Response]":
    body = {"preset": preset, "drain_s": 0}
    return asyncio.create_task(stage.http.post("/v1/models/load", json=body))


async def give(pipe: Path) -> None:
    """What the disk did not give: an empty object, to everybody who waits for it."""

    def write() -> None:
        with pipe.open("w") as file:
            file.write("{}")

    file = pipe.with_suffix(".new")
    file.write_text("{}")
    await asyncio.to_thread(write)
    file.replace(pipe)


async def answers(stage: Stage) -> dict[str, Any]:
    answer = await stage.http.post("/v1/chat/completions", json=TURN)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_a_template_that_does_not_end_is_refused_before_the_old_model_goes(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_check, "CPU_S", 1)
    changing = change(stage, "loop")
    while not changing.done():
        assert (await answers(stage))["model"] == "tiny"
        assert (await stage.http.get("/health")).json() == {"status": "ok"}
    refused = changing.result()
    assert refused.status_code == 400 and "takes longer than" in refused.text
    assert "chat template" in refused.text
    assert (await answers(stage))["model"] == "tiny"


async def test_a_load_that_takes_too_long_goes_back(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_swap, "STOP_S", 60.0)
    changing = change(stage, "stalled")
    await until_slowly(lambda: getattr(stage.service.change, "step", "") == "load")
    told = await stage.http.get("/health")
    assert told.json() == {"status": "swapping", "model": "model-stalled", "step": "load"}
    # The old preset is not loaded beside a load that goes on.
    await asyncio.sleep(LIMIT_S + 0.5)
    assert not changing.done() and stage.service.name == "model-stalled"
    await give(stage.home / "adapter" / "adapter_config.json")
    failed = await changing
    assert failed.status_code == 500
    assert f"without progress for {LIMIT_S:g} s" in failed.text
    assert "tiny answers again" in failed.text
    assert (await answers(stage))["model"] == "tiny"
    assert (await stage.http.get("/health")).json() == {"status": "ok"}
    assert not stage.end.done()


async def test_a_load_that_never_ends_ends_the_service(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor starts it again with the preset of before."""
    monkeypatch.setattr(model_swap, "STOP_S", 0.2)
    monkeypatch.setattr(services, "PARKING_S", 0.2)
    failed = await change(stage, "stalled")
    assert failed.status_code == 500 and f"for {LIMIT_S:g} s" in failed.text
    assert "start again" in failed.text
    assert await asyncio.wait_for(asyncio.shield(stage.end), PATIENCE_S) == 1
    assert stage.service.is_engine_left
    await give(stage.home / "adapter" / "adapter_config.json")
    await until_slowly(lambda: not stage.service.engine.is_alive())


async def test_a_stuck_step_is_no_good_health(stage: Stage) -> None:
    service = stage.service
    service.gate.close()
    try:
        began = time.monotonic() - 100.0
        service.change = services.Change("model-b", "load", began, limit_s=200.0)
        assert (await stage.http.get("/health")).status_code == 200
        service.change = services.Change("model-b", "load", began, limit_s=50.0)
        told = await stage.http.get("/health")
    finally:
        service.change = None
        service.gate.open()
    assert told.status_code == 503
    for word in ("model-b", "stuck", "load", "100 s"):
        assert word in told.json()["error"]["message"]


async def until_slowly(is_so: Any) -> None:
    """Wait for up to two minutes."""
    await until(is_so)


async def test_a_load_with_progress_is_not_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each report gives the load its whole time again."""
    pipe = stage.home / "adapter" / "adapter_config.json"
    is_over = asyncio.Event()

    async def report() -> None:
        while not is_over.is_set():
            stage.service.engine.load_progress.report("reading the weights")
            with suppress(TimeoutError):
                await asyncio.wait_for(is_over.wait(), LIMIT_S / 6)

    changing = change(stage, "stalled")
    await until_slowly(lambda: getattr(stage.service.change, "step", "") == "load")
    reporting = asyncio.create_task(report())
    await until_slowly(lambda: stage.service.engine.load_progress.n_reports > 8)
    change_under_way = stage.service.change
    assert not changing.done() and change_under_way is not None and not change_under_way.trouble
    is_over.set()
    await reporting
    await give(pipe)
    refused = await changing
    assert "without progress" not in refused.text
