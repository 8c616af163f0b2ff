"""Servers under test: addresses, and child processes in a sandbox."""

import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import httpx
import msgspec
from msgspec import Struct

from mlxstack.core.errors import Broken
from mlxstack.core.preset import ModelSpec, PrefixCacheSpec, Preset, ServerSpec, SlotSpec
from mlxstack.host.logs import tail
from mlxstack.host.parent_watchdog import VARIABLE
from mlxstack.host.process import free_port

HOST = "127.0.0.1"
POLL_S = 0.05
HEALTHY_WITHIN_S = 900.0
LIFELINE_S = "10"
PATIENCE_S = 60.0
"""A service that stops still writes the contexts of its slots."""


class ServerUnderTest(Struct, frozen=True):
    """Address of a server, model name in requests, process if known."""

    name: str
    url: str
    model: str
    api_key: str | None = None
    pid: int = 0


class Sandbox(Struct, frozen=True):
    """Sandbox: scratch `folder`, children's `env`, progress function `say`.

    `model` is a folder or a hub id that every contestant loads.
    """

    folder: Path
    env: dict[str, str]
    model: str
    say: Callable[[str], None]


@contextlib.asynccontextmanager
async def service(
    stage: Sandbox, home: str, slots: SlotSpec, cache: PrefixCacheSpec | None = None
) -> AsyncIterator[ServerUnderTest]:
    """Healthy service on this model; `home` names a persistent folder."""
    preset = Preset(
        model=ModelSpec(id=stage.model, alias="bench"),
        name="bench",
        slots=slots,
        prefix_cache=cache or PrefixCacheSpec(),
    )
    async with serve(preset, stage.folder / home, stage.env) as server:
        yield server


@contextlib.asynccontextmanager
async def serve(preset: Preset, root: Path, env: dict[str, str]) -> AsyncIterator[ServerUnderTest]:
    """Healthy service of a preset, with its home at `root`."""
    port = free_port(HOST)
    preset = msgspec.structs.replace(preset, server=ServerSpec(host=HOST, port=port))
    file = _preset_file(preset, root)
    command = [sys.executable, "-m", "mlxstack.cli.main", "serve", str(file)]
    child_env = {**env, "MLX_STACK_HOME": str(root), VARIABLE: LIFELINE_S}
    server = ServerUnderTest("mlx-stack", f"http://{HOST}:{port}", preset.model.served_name)
    async with child(command, child_env, root / "service.log", server) as pid:
        yield msgspec.structs.replace(server, pid=pid)


def _preset_file(preset: Preset, root: Path) -> Path:
    """Write a preset into the home of its service."""
    root.mkdir(parents=True, exist_ok=True)
    file = root / "preset.json"
    file.write_bytes(msgspec.json.encode(preset))
    return file


@contextlib.asynccontextmanager
async def mlx_lm_server(stage: Sandbox) -> AsyncIterator[ServerUnderTest]:
    """mlx-lm's own server from this very environment, on the stage's model."""
    port = free_port(HOST)
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", stage.model]
    command += ["--host", HOST, "--port", str(port), "--log-level", "ERROR"]
    server = ServerUnderTest("mlx_lm.server", f"http://{HOST}:{port}", "default_model")
    async with child(command, stage.env, stage.folder / "mlx_lm.log", server) as pid:
        yield msgspec.structs.replace(server, pid=pid)


def find_vllm_mlx(stage: Sandbox) -> str | None:
    """Program of vllm-mlx on the PATH, if any.

    It needs an environment of its own: another mlx-lm.
    """
    return shutil.which("vllm-mlx", path=stage.env.get("PATH"))


@contextlib.asynccontextmanager
async def vllm_mlx(stage: Sandbox, program: str) -> AsyncIterator[ServerUnderTest]:
    """vllm-mlx with the batching that several agents need, on the stage's model."""
    port = free_port(HOST)
    command = [program, "serve", stage.model, "--continuous-batching"]
    command += ["--host", HOST, "--port", str(port)]
    server = ServerUnderTest("vllm-mlx", f"http://{HOST}:{port}", stage.model)
    async with child(command, stage.env, stage.folder / "vllm_mlx.log", server) as pid:
        yield msgspec.structs.replace(server, pid=pid)


@contextlib.asynccontextmanager
async def child(
    command: Sequence[str], env: dict[str, str], log: Path, server: ServerUnderTest
) -> AsyncIterator[int]:
    """Id of a healthy child server, ended afterwards.

    Raises Broken when it does not start.
    """
    with log.open("ab") as words:
        process = await asyncio.create_subprocess_exec(
            *command, env=env, stdin=asyncio.subprocess.PIPE, stdout=words, stderr=words
        )
    try:
        await _until_healthy(process, server, log)
        yield process.pid
    finally:
        await _end(process)


async def _until_healthy(
    process: asyncio.subprocess.Process, server: ServerUnderTest, log: Path
) -> None:
    deadline = time.monotonic() + HEALTHY_WITHIN_S
    async with httpx.AsyncClient(base_url=server.url, timeout=5.0, trust_env=False) as http:
        while time.monotonic() < deadline and process.returncode is None:
            with contextlib.suppress(httpx.TransportError):
                if (await http.get("/health")).is_success:
                    return
            await asyncio.sleep(POLL_S)
    log_tail = "\n  ".join(tail(log, 8)) or "it said nothing"
    raise Broken(f"{server.name} did not become healthy; its last words:\n  {log_tail}")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    try:
        await asyncio.wait_for(process.wait(), PATIENCE_S)
    except TimeoutError:
        process.kill()
        await process.wait()
