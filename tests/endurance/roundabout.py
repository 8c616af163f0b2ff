"""Twelve agents on three slots, two models by turns, a restart and a kill -9 in between.

After every answer: it is what the same history gets from cold, and the history is complete.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
from msgspec import Struct

from mlxstack.core.preset import ModelSpec, Preset, ServerSpec, SlotSpec
from tests import models
from tests.cli.terminal import free_port

N_AGENTS = 12
N_SLOTS = 3
N_CTX = 2048
N_TOKENS = 4
BLOCK = 128
OPENING = 16
"""Tokens that open an answer; in a later prompt, the answer stands there."""
WAIT_S = 60.0
WORDS = ("pear", "boat", "rain", "stone", "lamp", "river", "glass", "cloud")


class Outcome(Struct, frozen=True):
    """`n_returns` came back to a model that they had talked to before."""

    n_requests: int
    n_returns: int
    n_swaps: int
    n_starts: int


class House:
    """A worker process over a home; it is started again from the preset that it last served."""

    def __init__(self, root: Path) -> None:
        self.home = root / "home"
        (self.home / "presets").mkdir(parents=True)
        self.source = self.home / "resolved.json"
        server = ServerSpec(port=free_port(), drain_s=2)
        self.url = f"http://127.0.0.1:{server.port}"
        for seed, name in enumerate(("a", "b"), start=1):
            folder = models.write(root / name, models.LLAMA, seed=seed)
            text = f"model: {{id: {folder}, alias: {name}}}\n"
            text += f"slots: {{count: {N_SLOTS}, n_ctx: {N_CTX}}}\n"
            (self.home / "presets" / f"{name}.yaml").write_text(text)
        first = Preset(
            model=ModelSpec(id=str(root / "a"), alias="a"),
            name="a",
            slots=SlotSpec(count=N_SLOTS, n_ctx=N_CTX),
            server=server,
        )
        self.source.write_bytes(msgspec.json.encode(first))
        self.n_starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Until it answers."""
        command = [sys.executable, "-m", "mlxstack.cli.main", "serve", str(self.source)]
        env = {**os.environ, "MLX_STACK_HOME": str(self.home)}
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        self.n_starts += 1
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end and self._process.poll() is None:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").is_success:
                    return
            time.sleep(0.05)
        raise AssertionError((self.home / "log").read_text()[-4000:])

    def end(self, number: int) -> None:
        """By this signal."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(WAIT_S)


class Agent:
    """What an agent must remember: its messages, and how long its last prompt was per model."""

    def __init__(self, number: int) -> None:
        self.id = f"agent-{number}"
        mine = f"You are number {number} and like the word {WORDS[number % len(WORDS)]}. "
        self.messages: list[Any] = [{"role": "system", "content": mine * 12}]
        self.n_prompt: dict[str, int] = {}
        self.is_shaken = False
        """Its last turn may not be on disk."""


def roundabout(root: Path, n_requests: int, swap_every: int, seed: int) -> Outcome:
    """Restart after a third of the requests, kill after two thirds. Raises AssertionError."""
    house, random = House(root), Random(seed)
    agents = [Agent(number) for number in range(N_AGENTS)]
    n_returns = n_swaps = 0
    model = "a"
    house.start()
    try:
        for n in range(1, n_requests + 1):
            with httpx.Client(base_url=house.url, timeout=WAIT_S) as http:
                n_returns += _turn(http, random.choice(agents), model, n)
                if n % swap_every == 0:
                    model = "b" if model == "a" else "a"
                    http.post("/v1/models/load", json={"preset": model}).raise_for_status()
                    n_swaps += 1
            if n in (n_requests // 3, 2 * n_requests // 3):
                is_kill = n > n_requests // 2
                house.end(signal.SIGKILL if is_kill else signal.SIGTERM)
                for agent in agents:
                    agent.is_shaken = is_kill
                house.start()
        _check_histories(house, agents)
    finally:
        house.end(signal.SIGTERM)
    return Outcome(n_requests, n_returns, n_swaps, house.n_starts)


def _turn(http: httpx.Client, agent: Agent, model: str, n: int) -> bool:
    """One turn; whether the agent came back to a model that knew it."""
    new = [{"role": "user", "content": f"turn {n} about {WORDS[n % len(WORDS)]}"}]
    if len(agent.messages) == 1:
        new = [*agent.messages, *new]
        agent.messages = []
    body = {"append": new, "max_tokens": N_TOKENS, "temperature": 0}
    answer = http.post(f"/v1/agents/{agent.id}/generate", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["model"] == model, "it is started again with the model that it had"
    agent.messages += new
    assert _words(found) == _words(_cold(http, agent.messages)), f"{agent.id} at {n}"
    before = agent.n_prompt.get(model)
    if before is not None:
        least = 1 if agent.is_shaken else (before - OPENING) // BLOCK * BLOCK
        cached = found["agent"]["cached_tokens"]
        assert cached >= least, f"{agent.id} at {n}: {cached} of {before} cached"
    agent.n_prompt[model] = found["usage"]["prompt_tokens"]
    agent.is_shaken = False
    said = found["choices"][0]["message"]
    agent.messages.append({"role": "assistant", **{k: v for k, v in said.items() if v}})
    return before is not None


def _cold(http: httpx.Client, messages: list[Any]) -> dict[str, Any]:
    body = {
        "messages": messages,
        "max_tokens": N_TOKENS,
        "temperature": 0,
        "cache_prompt": False,
        "id_slot": 0,
    }
    return dict(http.post("/v1/chat/completions", json=body).raise_for_status().json())


def _words(answer: dict[str, Any]) -> tuple[str, str]:
    said = answer["choices"][0]["message"]
    return said.get("content") or "", said.get("reasoning_content") or ""


def _check_histories(house: House, agents: list[Agent]) -> None:
    for agent in agents:
        if len(agent.messages) == 1:
            continue
        path = f"{house.url}/v1/agents/{agent.id}/history"
        kept = httpx.get(path).raise_for_status().json()["messages"]
        assert [(m["role"], m["content"]) for m in kept] == [
            (m["role"], m.get("content") or "") for m in agent.messages
        ], agent.id
