"""Two services of one home at once: `python -m tests.endurance.two_homes SEED ROUNDS`.

Agents' turns, deletions, saves, restores and sweeps go to either one at random and at the same
time. Every greedy answer is the one from cold; what one service refuses, it refuses in words; an
acknowledged turn is in the history that both read, and a deleted agent is gone in both.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from subprocess import DEVNULL
from threading import Lock
from typing import Any

import httpx
import msgspec
from msgspec import Struct

from mlxstack.core.preset import ModelSpec, Preset, SamplingSpec, ServerSpec, SlotSpec
from tests.api import serve_process
from tests.api.test_serve import wait_for
from tests.ports import unused_port

ROOT = Path(__file__).parents[2]
AGENTS = ("ann", "bob", "eve", "zoe")
CALM = {200, 204, 404, 409, 503}
"""Done, gone meanwhile, busy in the other service."""

Deed = Callable[[], None]


class HomesOutcome(Struct):
    """Rounds, turns that were acknowledged, refusals, answers compared."""

    n_rounds: int = 0
    n_turns: int = 0
    n_refused: int = 0
    n_compared: int = 0


class TwoHomes:
    """Both services; `said` is the text of the acknowledged turns of each agent."""

    def __init__(self, services: tuple[httpx.Client, httpx.Client], seed: int) -> None:
        self.services = services
        self.random = Random(seed)
        self.said: dict[str, set[str]] = {agent: set() for agent in AGENTS}
        self.outcome = HomesOutcome()
        self._lock = Lock()

    def round(self, number: int) -> None:
        """Deeds at once: one per agent, and housework; then all that was promised is looked at."""
        deeds: list[Deed] = []
        for agent in AGENTS:
            home = self.random.randrange(2)
            if self.random.random() < 0.15:
                deeds += [partial(self._delete, home, agent)]
                deeds += [partial(self._turn, 1 - home, agent, f"{number} against a deletion")]
            else:
                deeds += [
                    partial(self._turn, side, agent, f"{number} to {side}") for side in (0, 1)
                ]
        deeds.append(partial(self._slot, self.random.randrange(2), "save"))
        deeds.append(partial(self._slot, self.random.randrange(2), "restore"))
        deeds.append(partial(self._sweep, self.random.randrange(2)))
        self.random.shuffle(deeds)
        with ThreadPoolExecutor(len(deeds)) as pool:
            for done in [pool.submit(deed) for deed in deeds]:
                done.result()
        for agent in AGENTS:
            self._look(agent)
        self.outcome.n_rounds += 1

    def _ask(self, side: int, method: str, path: str, **more: Any) -> httpx.Response:
        answer = self.services[side].request(method, path, **more)
        assert answer.status_code in CALM, f"{method} {path}: {answer.status_code} {answer.text}"
        if not answer.is_success:
            assert answer.json()["error"]["message"]
        return answer

    def _turn(self, side: int, agent: str, text: str) -> None:
        body = {"append": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0}
        answer = self._ask(
            side, "POST", f"/v1/agents/{agent}/generate", json={**body, "queue": True}
        )
        with self._lock:
            self.outcome.n_turns += answer.is_success
            self.outcome.n_refused += not answer.is_success
        if answer.is_success and "deletion" not in text:
            self.said[agent].add(text)

    def _delete(self, side: int, agent: str) -> None:
        if self._ask(side, "DELETE", f"/v1/agents/{agent}").is_success:
            self.said[agent] = set()

    def _slot(self, side: int, action: str) -> None:
        body = {"filename": "shared.bin"}
        self._ask(side, "POST", f"/slots/{side}", params={"action": action}, json=body)

    def _sweep(self, side: int) -> None:
        self._ask(side, "POST", "/cache/gc", json={"max_bytes": 3_000_000})

    def _look(self, agent: str) -> None:
        """Both read one history with the acknowledged turns; the next answers are those of cold."""
        histories = [self._ask(side, "GET", f"/v1/agents/{agent}/history") for side in (0, 1)]
        assert histories[0].status_code == histories[1].status_code, agent
        if not histories[0].is_success:
            return
        messages = histories[0].json()["messages"]
        assert messages == histories[1].json()["messages"], agent
        texts = [message["content"] for message in messages if message["role"] == "user"]
        assert len(set(texts)) == len(texts), f"{agent}: a turn is there twice"
        missing = self.said[agent] - set(texts)
        assert not missing, f"{agent} lost {missing}"
        new = {"role": "user", "content": "And why?"}
        plain = {"messages": [*messages, new], "max_tokens": 4, "temperature": 0}
        cold = self._ask(0, "POST", "/v1/chat/completions", json={**plain, "cache_prompt": False})
        for side in (0, 1):
            answer = self._ask(side, "POST", "/v1/chat/completions", json=plain)
            expected = cold.json()["choices"][0]["message"]
            assert answer.json()["choices"][0]["message"] == expected, agent
            self.outcome.n_compared += 1
        if len(messages) > 24:
            self._delete(0, agent)


def two_homes(home: Path, seed: int, n_rounds: int) -> HomesOutcome:
    """As many rounds against two processes that begin at the same instant."""
    with _two(home) as services:
        both = TwoHomes(services, seed)
        for number in range(n_rounds):
            both.round(number)
        return both.outcome


@contextmanager
def _two(home: Path) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    home.mkdir(parents=True, exist_ok=True)
    presets = [
        Preset(
            model=ModelSpec(id="demo"),
            name=name,
            slots=SlotSpec(count=2, n_ctx=2048),
            sampling=SamplingSpec(temperature=0, thinking=False),
            server=ServerSpec(port=unused_port(), drain_s=1),
        )
        for name in ("one", "other")
    ]
    urls = [f"http://127.0.0.1:{preset.server.port}" for preset in presets]
    with ExitStack() as stack:
        for preset in presets:
            file = home / f"{preset.name}.json"
            file.write_bytes(msgspec.json.encode(preset))
            arguments = str(file), str(home / "home")
            command = [sys.executable, "-m", serve_process.MODULE, *arguments]
            worker = stack.enter_context(subprocess.Popen(command, cwd=ROOT, stderr=DEVNULL))
            stack.callback(worker.kill)
        for url in urls:
            wait_for(url)
        first, second = (
            stack.enter_context(httpx.Client(base_url=url, timeout=240)) for url in urls
        )
        yield first, second


if __name__ == "__main__":
    args = [int(word) for word in sys.argv[1:3]]
    print(two_homes(Path(tempfile.mkdtemp(prefix="two-homes-")), *args), flush=True)
