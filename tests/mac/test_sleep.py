"""Idle sleep is prevented while requests run, and only then; `caffeinate` is imitated."""

import asyncio
import os
from functools import partial
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from mlxstack.client.types import PropsResponse
from mlxstack.core.preset import ModelSpec, Preset, ServerSpec
from mlxstack.core.prompt_tokens import PromptTokens
from mlxstack.core.request import Request
from mlxstack.demo import MODEL_DIR
from mlxstack.host import sleep
from mlxstack.service import service as services
from mlxstack.service.service import Service
from tests.api.running import running
from tests.patience import PATIENCE_S, until
from tests.service.standin import FACTS, StandIn, over

LINGER_S = 0.2


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Mac whose `caffeinate` writes down its arguments and runs until it is ended."""
    file = tmp_path / "caffeinate"
    file.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec sleep 60\n')
    file.chmod(0o755)
    monkeypatch.setattr(sleep, "CAFFEINATE", str(file))
    monkeypatch.setattr(sleep, "LINGER_S", LINGER_S)
    monkeypatch.setattr(services, "caffeinate", partial(sleep.caffeinate, "darwin"))
    return file


async def started(*, prevent_sleep: bool = True) -> Service:
    engine = StandIn(load_tokenizer(MODEL_DIR), None)
    server = ServerSpec(prevent_sleep=prevent_sleep)
    service = over(engine, Preset(model=ModelSpec(id="standin"), server=server))
    engine.loading.set_result(FACTS)
    await service.start()
    return service


def children() -> list[psutil.Process]:
    return [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]


def calls(program: Path) -> list[str]:
    file = program.parent / "calls"
    return file.read_text().splitlines() if file.exists() else []


def ends_at_once(program: Path) -> None:
    program.write_text("#!/bin/sh\nexit 1\n")


def runs(program: Path) -> None:
    program.write_text("#!/bin/sh\nexec sleep 60\n")


async def test_the_assertion_is_held_iff_requests_run(program: Path) -> None:
    service = await started()
    assert not service.sleep.is_held
    before = len(children())
    with service.open(Request("a", PromptTokens((1, 2)), 4), service.text_processor):
        assert service.sleep.is_held
        with service.open(Request("b", PromptTokens((1, 2)), 4), service.text_processor):
            assert len(children()) == before + 1
        await asyncio.sleep(2 * LINGER_S)
        assert service.sleep.is_held
    assert service.sleep.is_held, "an agent runs its tools between two requests"
    await until(lambda: not service.sleep.is_held)
    assert len(children()) == before
    with service.open(Request("c", PromptTokens((1, 2)), 4), service.text_processor):
        assert service.sleep.is_held
        await until(lambda: calls(program) == [f"-i -w {os.getpid()}"] * 2)
    await service.stop(0.1)
    assert not service.sleep.is_held


async def test_a_program_that_ends_by_itself_is_started_for_the_next_request(program: Path) -> None:
    service = await started()
    ends_at_once(program)
    with service.open(Request("a", PromptTokens((1, 2)), 4), service.text_processor):
        await until(lambda: not service.sleep.is_held)
        runs(program)
        with service.open(Request("b", PromptTokens((1, 2)), 4), service.text_processor):
            assert service.sleep.is_held
    await service.stop(0.1)


async def test_nothing_is_held_where_the_preset_says_so(program: Path) -> None:
    service = await started(prevent_sleep=False)
    with service.open(Request("a", PromptTokens((1, 2)), 4), service.text_processor):
        assert not service.sleep.is_held
    await service.stop(0.1)
    assert not calls(program)


@pytest.mark.mlx
@pytest.mark.net
@pytest.mark.usefixtures("program")
def test_a_running_service_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "LINGER_S", PATIENCE_S)
    preset = Preset(model=ModelSpec(id="demo"), server=ServerSpec(port=0))
    body = {"prompt": "Hello", "max_tokens": 2}
    with running(preset, tmp_path / "home") as live:
        before = msgspec.convert(httpx.get(f"{live.url}/props").json(), PropsResponse)
        assert (
            httpx.post(f"{live.url}/v1/completions", json=body, timeout=PATIENCE_S).status_code
            == 200
        )
        after = msgspec.convert(httpx.get(f"{live.url}/props").json(), PropsResponse)
    assert "prevents idle sleep" not in before.remarks
    assert "prevents idle sleep" in after.remarks, "`status` prints the remarks"


async def test_a_missing_program_is_told_and_requests_run(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleep, "CAFFEINATE", "/nowhere/caffeinate")
    service = await started()
    with service.open(Request("a", PromptTokens((1, 2)), 4), service.text_processor):
        assert not service.sleep.is_held
        assert "/nowhere/caffeinate" in service.sleep.why_not
    await service.stop(0.1)


def test_other_systems_hold_nothing() -> None:
    assert sleep.caffeinate("linux") is None
    before = children()
    with sleep.SleepAssertion(None).request():
        assert children() == before
