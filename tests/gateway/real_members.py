"""A gateway over real members, in processes of their own."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from msgspec import Struct

from mlxstack.control import gateway
from mlxstack.control.start import StartRequest
from mlxstack.gateway.spec import GatewaySpec
from mlxstack.host import services
from mlxstack.host.home import Home
from mlxstack.host.services import ServiceState, owner
from tests import models
from tests.patience import PATIENCE_S
from tests.patience import wait_until as until

TINY = {**models.LLAMA, "vocab_size": 1024}


class Site(Struct):
    """A gateway that runs, and the files of it and its members."""

    spec: GatewaySpec
    url: str
    home: Home

    def state(self, name: str) -> ServiceState:
        state = owner(self.home, name)
        assert state is not None
        return state

    def models(self) -> dict[str, dict[str, object]]:
        return cards(self.url)


def cards(url: str) -> dict[str, dict[str, object]]:
    """The models that a gateway lists, by their ids."""
    listed = httpx.get(url + "/v1/models", timeout=PATIENCE_S).raise_for_status().json()["data"]
    return {card["id"]: card for card in listed}


def n_workers(home: Home) -> int:
    """Processes that serve a model for a gateway of this home."""
    return sum("serve" in process.cmdline() for process in own_processes(home))


def write_presets(folder: Path, server: dict[str, object]) -> list[str]:
    """Three presets: the demo, a tiny random model, embeddings of the demo."""
    models.write(folder / "tiny", TINY)
    quick = {"startup_timeout_s": 120, "drain_s": 1, **server}
    presets = {
        "demo": {"extends": "demo", "server": quick, "slots": {"count": 4, "n_ctx": 1024}},
        "second": {
            "model": {"id": str(folder / "tiny"), "alias": "tiny"},
            "server": {**quick, "api_keys": []},
            "slots": {"count": 4, "n_ctx": 1024},
        },
        "vectors": {"extends": "demo-embedding", "server": {**quick, "api_keys": []}},
    }
    for name, content in presets.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"name": name, **content}))
    return [str(folder / f"{name}.yaml") for name in presets]


@contextmanager
def serving(
    folder: Path, files: list[str], memory: str | None = None, linger_s: float = 0.5
) -> Iterator[Site]:
    """A gateway under its supervisor; everything is ended at the end."""
    home = Home(folder / "home")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLX_STACK_WORKER", raising=False)
        if memory is not None:
            patch.setenv("MLX_STACK_MEMORY", memory)
        requests = [StartRequest(file, (), folder) for file in files]
        plan = gateway.prepare("front", requests, home, linger_s=linger_s)
        process = services.start(plan.service)
        try:
            until(lambda: is_healthy(plan.service.url), "the gateway never answered")
            yield Site(plan.spec, plan.service.url, home)
        finally:
            state = owner(home, "front")
            if state is not None:
                services.stop(home, state, state.spec.policy.grace_s)
            process.wait(PATIENCE_S)
            kill_all(home)


def is_healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=PATIENCE_S).status_code == 200
    except httpx.HTTPError:
        return False


def own_processes(home: Home) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        try:
            if str(home.root) in " ".join(process.cmdline()):
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def kill_all(home: Home) -> None:
    """End these processes; some end with others before their turn."""
    for process in own_processes(home):
        with suppress(psutil.NoSuchProcess):
            process.kill()
