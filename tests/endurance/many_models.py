"""Thousands of models on a disk, and two gateways in one home: `... many_models N`.

`models` and `up --any-model` list all of them, as `/v1/models` does; any one answers, the idle
gateway computes nothing, a second gateway of the home is served beside it or refused in words, and
`down` leaves no process.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from msgspec import Struct

from mlxstack.host.home import Home
from tests import models
from tests.gateway.any_model_site import run
from tests.gateway.real_members import kill_all, own_processes
from tests.patience import PATIENCE_S, wait_until
from tests.ports import unused_port

MAX_BYTES = 600 << 20
"""Memory of a gateway over any number of models."""
ANSWER = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}


class ManyOutcome(Struct, frozen=True):
    """Models listed; seconds of `models`, `up` and the slowest list; MiB of the gateway."""

    n_models: int
    models_s: float
    up_s: float
    list_s: float
    n_mib: int


def many_models(root: Path, n_models: int) -> ManyOutcome:
    """Raises AssertionError."""
    with _home(root, n_models) as env:
        port = unused_port()
        began = time.monotonic()
        listed = run(env, "models", "--json")
        assert listed.returncode == 0, listed.stderr
        assert len(json.loads(listed.stdout)["models"]) >= n_models
        models_s = time.monotonic() - began
        began = time.monotonic()
        started = run(env, "up", "--any-model", "--port", str(port), "--name", "first")
        assert started.returncode == 0, started.stdout + started.stderr
        up_s = time.monotonic() - began
        url = f"http://127.0.0.1:{port}"
        list_s = 0.0
        for _ in range(5):
            began = time.monotonic()
            cards = httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).json()["data"]
            list_s = max(list_s, time.monotonic() - began)
        assert len(cards) >= n_models
        expected = _answer(url, cards[n_models // 2]["id"])
        _second_gateway(env, url, cards[0]["id"])
        assert _answer(url, cards[n_models // 2]["id"]) == expected
        gateway = _gateway_process(env)
        n_bytes = gateway.memory_info().rss
        assert n_bytes < MAX_BYTES, f"{n_bytes >> 20} MiB"
        before = sum(gateway.cpu_times()[:2])
        began = time.monotonic()
        time.sleep(3)
        share = (sum(gateway.cpu_times()[:2]) - before) / (time.monotonic() - began)
        assert share < 0.5, f"the idle gateway takes {share:.2f} cores"
        down = run(env, "down")
        assert down.returncode == 0, down.stdout + down.stderr
        home = Home(Path(env["MLX_STACK_HOME"]))
        wait_until(lambda: not own_processes(home), "`down` left a process")
        return ManyOutcome(len(cards), models_s, up_s, list_s, n_bytes >> 20)


@contextmanager
def _home(root: Path, n_models: int) -> Iterator[dict[str, str]]:
    """Environment of a user with as many models in LM Studio's folder."""
    source = models.write(root / "source", {**models.LLAMA, "vocab_size": 1024})
    for n in range(n_models):
        folder = root / "user" / ".lmstudio" / "models" / "many" / f"m{n:05}"
        folder.mkdir(parents=True)
        for file in source.iterdir():
            if file.suffix == ".safetensors":
                (folder / file.name).symlink_to(file)
            else:
                shutil.copy(file, folder / file.name)
    env = {
        **os.environ,
        "HOME": str(root / "user"),
        "HF_HUB_CACHE": str(root / "hub"),
        "HF_HUB_OFFLINE": "1",
        "MLX_STACK_HOME": str(root / "home"),
    }
    env.pop("MLX_STACK_WORKER", None)
    try:
        yield env
    finally:
        run(env, "down")
        kill_all(Home(root / "home"))


def _second_gateway(env: dict[str, str], first: str, model: str) -> None:
    """Start another gateway of the same home, use both, and stop it."""
    port = unused_port()
    done = run(env, "up", "--any-model", "--port", str(port), "--name", "second")
    if done.returncode != 0:
        assert "is already running" in done.stderr and "Traceback" not in done.stderr, done.stderr
        return
    assert _answer(f"http://127.0.0.1:{port}", model) == _answer(first, model)
    ended = run(env, "down", "second")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert httpx.get(f"{first}/health", timeout=PATIENCE_S).is_success


def _answer(url: str, model: str) -> object:
    answer = httpx.post(
        f"{url}/v1/chat/completions", json={"model": model, **ANSWER}, timeout=PATIENCE_S
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def _gateway_process(env: dict[str, str]) -> psutil.Process:
    home = Home(Path(env["MLX_STACK_HOME"]))
    return next(
        process for process in own_processes(home) if "mlxstack.gateway" in process.cmdline()
    )


if __name__ == "__main__":
    n_models = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    print(many_models(Path(tempfile.mkdtemp(prefix="many-")), n_models), flush=True)
