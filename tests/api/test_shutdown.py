"""A shutdown during a long step: every request gets an answer, and the KV of agents is parked."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import Struct

from mlxstack.api.dialects.openai_chat.messages import read_message_file
from mlxstack.api.server import UvicornServer, config, serve
from mlxstack.core.preset import AgentsSpec, Persist, ServerSpec, SlotSpec
from mlxstack.service.assembly import assemble
from mlxstack.service.service import Service
from tests.api.running import tiny_preset
from tests.api.test_serve import wait_for
from tests.api.test_swap import until
from tests.patience import PATIENCE_S
from tests.ports import unused_port

pytestmark = [pytest.mark.mlx, pytest.mark.net]

TURN = [{"role": "user", "content": "hello " * 200}]
LONG = {"messages": TURN, "max_tokens": 500, "ignore_eos": True}


class Stage(Struct):
    """A service of a tiny model whose end can be awaited."""

    service: Service
    leaving: asyncio.Event
    end: "asyncio.Task[int]"
    http: httpx.AsyncClient


@pytest.fixture
async def stage(model_folder: Path, tmp_path: Path) -> AsyncIterator[Stage]:
    preset = tiny_preset(
        model_folder,
        slots=SlotSpec(count=4, n_ctx=1024),
        agents=AgentsSpec(persist=Persist.ON_PARK),
        server=ServerSpec(port=0, drain_s=0.3),
    )
    service = assemble(preset, tmp_path, read_message_file)
    server = UvicornServer(config(service))
    leaving = asyncio.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        end = asyncio.create_task(serve(service, server, listener, leaving))
        await until(lambda: server.started and service.health == "ok")
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            yield Stage(service, leaving, end, http)
        leaving.set()
        await end


async def test_requests_end_with_the_drain_while_a_step_goes_on(
    stage: Stage, tmp_path: Path
) -> None:
    service = stage.service
    step_ends = threading.Event()
    prompt_maker = service.text_processor.prompt_maker
    make = service.text_processor.prompt_maker.make
    turn = await stage.http.post(
        "/v1/agents/ann/generate",
        json={"append": [{"role": "user", "content": "good day " * 99}], "max_tokens": 4},
    )
    assert turn.status_code == 200
    assert not list((tmp_path / "agents" / "ann").glob("*/manifest.json"))

    def ask(path: str, body: dict[str, Any]) -> "asyncio.Task[httpx.Response]":
        return asyncio.create_task(stage.http.post(path, json=body))

    answers = {
        "chat": ask("/v1/chat/completions", LONG),
        "stream": ask("/v1/chat/completions", {**LONG, "stream": True}),
        "messages": ask("/v1/messages", LONG),
    }
    await until(lambda: sum(slot.n_decoded > 0 for slot in service.engine.snapshot().slots) >= 3)
    # The step of a slow machine, and a tokenizer at work on a long prompt.
    service.engine.post(lambda: step_ends.wait(PATIENCE_S))  # type: ignore[attr-defined]
    prompt_maker.make = lambda *told: (step_ends.wait(PATIENCE_S), make(*told))[1]  # type: ignore[method-assign]
    answers["prepared"] = ask("/v1/chat/completions", LONG)
    answers["queued"] = ask("/completion", {"prompt": "hello", "n_predict": 4})
    await until(lambda: service.gate.n_inside == len(answers))
    try:
        stage.leaving.set()
        _, late = await asyncio.wait(answers.values(), timeout=PATIENCE_S)
    finally:
        step_ends.set()
    assert not late
    found = {name: task.result() for name, task in answers.items()}
    stream = found.pop("stream")
    # Its head may have waited for the first event of the engine still.
    assert stream.status_code in (200, 503) and '"error"' in stream.text.rsplit("data: ", 1)[-1]
    for name, answer in found.items():
        assert answer.status_code in (503, 529), (name, answer.text)
        assert "retry-after" in answer.headers, name
    assert found["messages"].json()["type"] == "error"
    assert await asyncio.wait_for(asyncio.shield(stage.end), PATIENCE_S) == 0
    assert not service.is_engine_left
    assert list((tmp_path / "agents" / "ann").glob("*/manifest.json")), "parked after the step"


STUCK = """
import logging, pathlib, sys, time
import msgspec
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
from mlxstack.api.server import run
from mlxstack.core.preset import Preset
from mlxstack.service import service
from tests import self_checks
self_checks.install()
service.PARKING_S = 0.5
preset = msgspec.json.decode(pathlib.Path(sys.argv[1]).read_bytes(), type=Preset)
start = service.Service.start
async def start_and_stick(self):
    facts = await start(self)
    self.engine.post(lambda: time.sleep(300))
    return facts
service.Service.start = start_and_stick
sys.exit(run(preset, pathlib.Path(sys.argv[2])))
"""


@pytest.mark.slow
def test_a_stuck_engine_does_not_abort_the_exit(model_folder: Path, tmp_path: Path) -> None:
    port = unused_port()
    preset = tiny_preset(model_folder, server=ServerSpec(port=port, drain_s=0.3))
    (tmp_path / "preset.json").write_bytes(msgspec.json.encode(preset))
    command = [sys.executable, "-c", STUCK, str(tmp_path / "preset.json"), str(tmp_path / "home")]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as found:
        try:
            wait_for(f"http://127.0.0.1:{port}")
            found.send_signal(signal.SIGTERM)
            assert found.wait(PATIENCE_S) == 0
            assert found.stderr is not None
            assert "engine did not stop in time" in found.stderr.read()
        finally:
            found.kill()
