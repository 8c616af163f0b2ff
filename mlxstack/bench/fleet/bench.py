"""Fleet benchmark from a request to its results."""

import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.bench.fleet.play import FleetPlan, play_all
from mlxstack.bench.fleet.report import results
from mlxstack.bench.fleet.session import RecordedSession, requests
from mlxstack.bench.report import Results
from mlxstack.bench.servers import (
    Sandbox,
    ServerUnderTest,
    find_vllm_mlx,
    mlx_lm_server,
    service,
    vllm_mlx,
)
from mlxstack.core.errors import Broken, SetupError
from mlxstack.core.preset import SlotSpec

MAX_CONTEXT = 32768
"""Tokens of a slot of the servers that are started here."""
FULL = 0.9
"""Share of a context that a session may take, by estimate."""
NEVER = -100.0
"""Bias of a token that is not chosen."""

Say = Callable[[str], None]


class FleetRequest(Struct, frozen=True):
    """Plan, passes and running servers."""

    plan: FleetPlan
    passes: int = 1
    servers: tuple[ServerUnderTest, ...] = ()


def fitting(plan: FleetPlan, n_ctx: int, say: Say) -> tuple[RecordedSession, ...]:
    """Sessions whose longest request fits. Raises SetupError where none does."""
    chosen = []
    for session in plan.sessions:
        played = list(requests(session, "", 0))[: plan.max_requests]
        n_tokens = max(request.n_tokens for request in played)
        if n_tokens <= FULL * n_ctx:
            chosen.append(session)
        else:
            say(f"{session.client} is left out: about {n_tokens} tokens, where {n_ctx} fit")
    if not chosen:
        raise SetupError(f"no session fits a context of {n_ctx} tokens")
    return tuple(chosen)


async def run_servers(request: FleetRequest, say: Say) -> Results:
    """Play on running servers."""
    run = secrets.token_hex(2)
    passes = []
    for n in range(request.passes):
        say(f"pass {n + 1} of {request.passes}")
        passes.append(await play_all(request.servers, request.plan, f"{run}-{n}"))
    return results(passes, request.plan)


async def run_model(stage: Sandbox, request: FleetRequest) -> Results:
    """Play on servers started for a model folder: ours, mlx-lm's, vllm-mlx.

    None of them may end an answer before its recorded length.
    """
    config = _config(stage.model)
    n_ctx = min(MAX_CONTEXT, config.get("max_position_embeddings", MAX_CONTEXT))
    plan = replace(
        request.plan,
        sessions=fitting(request.plan, n_ctx, stage.say),
        extra={"logit_bias": dict.fromkeys(_ends(stage.model, config), NEVER)},
    )
    async with AsyncExitStack() as stack:
        slots = SlotSpec(count=max(plan.widths), n_ctx=n_ctx)
        servers = [
            await stack.enter_async_context(service(stage, "fleet", slots)),
            await stack.enter_async_context(mlx_lm_server(stage)),
        ]
        if (command := find_vllm_mlx(stage)) is not None:
            servers.append(await stack.enter_async_context(vllm_mlx(stage, command)))
        return await run_servers(replace(request, plan=plan, servers=tuple(servers)), stage.say)


def _config(model: str) -> dict[str, Any]:
    """`config.json` of a folder. Raises SetupError where it has none."""
    try:
        return msgspec.json.decode((Path(model) / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise SetupError(f"{model} is no folder of an MLX model ({error})") from error


def _ends(model: str, config: dict[str, Any]) -> list[str]:
    """Ids of tokens that end an answer, as keys of `logit_bias`."""
    ends: set[int] = set()
    for source in (config, _config_or_none(Path(model) / "generation_config.json")):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            ends.add(value)
        elif isinstance(value, list):
            ends.update(value)
    return [str(token) for token in sorted(ends)]


def _config_or_none(file: Path) -> dict[str, Any]:
    if file.exists():
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    return {}


async def find_model(url: str, name: str | None, key: str | None) -> ServerUnderTest:
    """Server at a URL with its first model, unless one is named.

    Raises Broken for a server that lists none.
    """
    title = url.removeprefix("http://").removeprefix("https://")
    if name is not None:
        return ServerUnderTest(title, url, name, key)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as http:
        answer = await http.get("/v1/models")
    listed = answer.json().get("data", []) if answer.is_success else []
    if not listed:
        raise Broken(
            f"{url}/v1/models answered HTTP {answer.status_code} and names no model; "
            "name it by --model"
        )
    return ServerUnderTest(title, url, listed[0]["id"], key)
