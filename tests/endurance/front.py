"""Agents over two chat models behind one gateway with memory for fewer members than it has.

Gateway and members are killed in between; every answer is compared with the same conversation
computed before without a cache, alone.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import httpx
from msgspec import Struct

from mlxstack.host.services import owner
from tests.gateway.real_members import Site, serving, write_presets

MEMORY = "260MB"
"""Room for any two of the three members."""

CHATS = ("demo", "tiny")
VICTIMS = ("front", "demo", "second", "vectors")
LONG_MIN = 6.0
"""Minutes in which every process is killed more than once."""

CHAT = "/v1/chat/completions"
N_EMBED = 20
"""Of so many visits one embeds a text, for which another member has to leave."""
N_SCRIPTS = 3
N_TURNS = 3
LINGER_S = 2.0
CALL_S = 240.0
PAUSE_S = 0.5


class FrontOutcome(Struct):
    """`n_returns` requests continued a conversation, `n_cold` of them without any cached token.

    `longest_s` is the longest wait for an answer, retries apart; `n_kills` those of each process.
    """

    n_answers: int = 0
    n_wrong: int = 0
    n_returns: int = 0
    n_cold: int = 0
    n_retries: int = 0
    n_unloads: dict[str, int] = {}
    n_kills: dict[str, int] = {}
    longest_s: float = 0.0
    seconds: float = 0.0
    faults: list[str] = []


def question(script: int, turn: int) -> dict[str, str]:
    text = " ".join(f"w{(script * 131 + turn * 17 + i) % 97}" for i in range(40))
    return {"role": "user", "content": f"{text}. Hello!"}


def body_of(model: str, messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    plain = {"chat_template_kwargs": {"enable_thinking": False}, "temperature": 0}
    return {"model": model, "messages": messages, "max_tokens": 5, **plain, **more}


class Crowd:
    """What the agents share: the address, the right answers, the outcome."""

    def __init__(self, site: Site, ends: float) -> None:
        self.site = site
        self.ends = ends
        self.outcome = FrontOutcome(n_unloads={}, n_kills={}, faults=[])
        self.truth: dict[tuple[str, int], list[str]] = {}
        self.vector: list[float] = []
        self._lock = threading.Lock()

    def learn(self) -> None:
        """Compute every conversation without a cache."""
        with httpx.Client(base_url=self.site.url, timeout=CALL_S) as http:
            for model in CHATS:
                for script in range(N_SCRIPTS):
                    messages = []
                    texts = []
                    for turn in range(N_TURNS):
                        messages.append(question(script, turn))
                        answer = self.ask(http, CHAT, body_of(model, messages, cache_prompt=False))
                        texts.append(answer["choices"][0]["message"]["content"])
                        messages.append({"role": "assistant", "content": texts[-1]})
                    self.truth[model, script] = texts
            self.vector = self.embed(http)

    def ask(self, http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """An answer; as SDKs do, again where the server was gone or said so."""
        while True:
            began = time.monotonic()
            try:
                answer = http.post(path, json=body)
                with self._lock:
                    waited_s = time.monotonic() - began
                    self.outcome.longest_s = max(self.outcome.longest_s, waited_s)
                if answer.status_code == 200:
                    return dict(answer.json())
                reason = f"{answer.status_code} {answer.text}"
                assert answer.status_code >= 500, reason
            except httpx.TransportError as error:
                assert not isinstance(error, httpx.TimeoutException), "a client timed out"
                reason = repr(error)
            with self._lock:
                self.outcome.n_retries += 1
                assert self.outcome.n_retries < 500, reason
            time.sleep(PAUSE_S)

    def embed(self, http: httpx.Client) -> list[float]:
        answer = self.ask(http, "/v1/embeddings", {"model": "vectors", "input": "hello"})
        return list(answer["data"][0]["embedding"])

    def agent(self, number: int) -> None:
        """Take turns in one conversation per model and visit, with pauses; one visit at least."""
        dice = Random(number)
        visit = 0
        try:
            with httpx.Client(base_url=self.site.url, timeout=CALL_S) as http:
                while not visit or time.monotonic() < self.ends:
                    visit += 1
                    self.visit(http, dice, f"a{number}-{visit}")
        except Exception as error:  # a thread has no other way to tell
            with self._lock:
                self.outcome.faults.append(repr(error))

    def visit(self, http: httpx.Client, dice: Random, name: str) -> None:
        """Both models in turn, in random order, one conversation with each."""
        script = dice.randrange(N_SCRIPTS)
        if not dice.randrange(N_EMBED):
            assert self.embed(http) == self.vector, "another vector"
        talks: dict[str, list[dict[str, str]]] = {model: [] for model in CHATS}
        left = [model for model in CHATS for _ in range(N_TURNS)]
        dice.shuffle(left)
        for model in left:
            messages = talks[model]
            turn = len(talks[model]) // 2
            messages.append(question(script, turn))
            answer = self.ask(http, CHAT, body_of(model, messages, agent=f"{name}-{model}"))
            text = answer["choices"][0]["message"]["content"]
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            messages.append({"role": "assistant", "content": text})
            with self._lock:
                self.outcome.n_answers += 1
                self.outcome.n_wrong += text != self.truth[model, script][turn]
                self.outcome.n_returns += turn > 0
                self.outcome.n_cold += turn > 0 and not cached
            time.sleep(dice.random() * PAUSE_S)


def kill_worker(site: Site, name: str) -> bool:
    state = owner(site.home, name)
    if state is None or state.worker is None:
        return False
    os.kill(state.worker.pid, signal.SIGKILL)
    return True


def front(
    folder: Path, seconds: float, n_agents: int, kill_every_s: float, seed: int
) -> FrontOutcome:
    """Run the agents for `seconds`; a gateway or a member is killed every `kill_every_s`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = write_presets(folder, {"port": 0})
    with serving(folder, files, MEMORY, LINGER_S) as site:
        crowd = Crowd(site, 0.0)
        crowd.learn()
        began = time.monotonic()
        crowd.ends = began + seconds
        agents = [threading.Thread(target=crowd.agent, args=(i,)) for i in range(n_agents)]
        for agent in agents:
            agent.start()
        victims = cycle(Random(seed).sample(VICTIMS, len(VICTIMS)))
        next_kill = began + kill_every_s
        while any(agent.is_alive() for agent in agents):
            if next_kill <= time.monotonic() < crowd.ends:
                victim = next(victims)
                n_before = crowd.outcome.n_kills.get(victim, 0)
                crowd.outcome.n_kills[victim] = n_before + kill_worker(site, victim)
                next_kill = time.monotonic() + kill_every_s
            time.sleep(0.1)
        with httpx.Client(base_url=site.url, timeout=CALL_S) as http:
            if crowd.embed(http) != crowd.vector:
                crowd.outcome.faults.append("another vector")
        log = site.home.log_file("front").read_text()
        crowd.outcome.n_unloads = {
            member.name: log.count(f"{member.name} is unloaded") for member in site.spec.members
        }
        crowd.outcome.seconds = time.monotonic() - began
    return crowd.outcome


def check(outcome: FrontOutcome) -> None:
    """Every answer right, every return from the cache, swaps within the linger rule, no loss."""
    assert outcome.faults == [] and outcome.n_wrong == 0
    n_kills = sum(outcome.n_kills.values())
    assert n_kills >= 2 and outcome.n_answers >= 12 * 2 * N_TURNS
    assert outcome.n_returns >= outcome.n_answers // 2 and outcome.n_cold == 0
    assert sum(outcome.n_unloads.values()) >= 1
    for n_unloads in outcome.n_unloads.values():
        assert n_unloads <= (outcome.seconds + 60) / LINGER_S + n_kills + 1


def main(minutes: float) -> None:
    """Twelve agents for so many minutes; a process is killed every 40 seconds."""
    folder = Path(tempfile.mkdtemp(prefix="front-"))
    outcome = front(folder, minutes * 60, n_agents=12, kill_every_s=40, seed=1)
    print(outcome)
    check(outcome)
    assert minutes < LONG_MIN or all(outcome.n_kills.get(victim, 0) > 1 for victim in VICTIMS)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)
