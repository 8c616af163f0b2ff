"""Twelve agents on three slots, two models by turns, a restart and a kill -9 in between.

After every answer: it is what the same history gets from cold, and the history is complete.
"""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
from msgspec import Struct

from mlxstack.core.preset import ModelSpec, Preset, SlotSpec
from tests import models
from tests.endurance.talkers import WORDS
from tests.endurance.worker import WAIT_S, Worker

N_AGENTS = 12
N_SLOTS = 3
N_CTX = 2048
N_TOKENS = 4
BLOCK = 128
OPENING = 16
"""Tokens that open an answer; in a later prompt, the answer stands there."""


class Outcome(Struct, frozen=True):
    """`n_returns` came back to a model that they had talked to before."""

    n_requests: int
    n_returns: int
    n_swaps: int
    n_starts: int


def house_of(root: Path) -> Worker:
    """A worker of preset `a`, which may change to `b`."""
    for seed, name in enumerate(("a", "b"), start=1):
        models.write(root / name, models.LLAMA, seed=seed)
    slots = SlotSpec(count=N_SLOTS, n_ctx=N_CTX)
    house = Worker(
        root, Preset(model=ModelSpec(id=str(root / "a"), alias="a"), name="a", slots=slots)
    )
    for name in ("a", "b"):
        text = f"model: {{id: {root / name}, alias: {name}}}\n"
        text += f"slots: {{count: {N_SLOTS}, n_ctx: {N_CTX}}}\n"
        (house.home / "presets" / f"{name}.yaml").write_text(text)
    return house


class Agent:
    """What an agent must remember: its messages, and how long its last prompt was per model."""

    def __init__(self, number: int) -> None:
        self.id = f"agent-{number}"
        mine = f"You are number {number} and like the word {WORDS[number % len(WORDS)]}. "
        self.rules = {"role": "system", "content": mine * 12}
        self.messages: list[Any] = []
        self.n_prompt: dict[str, int] = {}
        self.is_shaken = False
        """Its last turn may not be on disk."""


class Claim(Struct, frozen=True):
    """This model answered these messages so."""

    who: str
    model: str
    messages: tuple[Any, ...]
    texts: tuple[str, str]


def roundabout(root: Path, n_requests: int, swap_every: int, seed: int) -> Outcome:
    """Three agents speak at a time, models are changed while they do.

    Restarted after a third of the requests, killed after two thirds; `n_requests` is a multiple
    of nine. Raises AssertionError.
    """
    house = house_of(root)
    random = Random(seed)
    agents = [Agent(number) for number in range(N_AGENTS)]
    claims: list[Claim] = []
    n_returns = n_swaps = 0
    model = "a"
    house.start()
    try:
        for n in range(N_SLOTS, n_requests + 1, N_SLOTS):
            next_model = model
            if n // swap_every > (n - N_SLOTS) // swap_every:
                next_model = "b" if model == "a" else "a"
                n_swaps = n_swaps + 1
            speakers = random.sample(agents, N_SLOTS)
            n_returns += sum(model in speaker.n_prompt for speaker in speakers)
            claims += _round(house, speakers, n, next_model if next_model != model else None)
            model = next_model
            claims = _proven(house, claims, model)
            if n in (n_requests // 3, 2 * n_requests // 3):
                is_kill = n > n_requests // 2
                house.end(signal.SIGKILL if is_kill else signal.SIGTERM)
                for agent in agents:
                    agent.is_shaken = is_kill
                house.start()
        _load(house, "b" if model == "a" else "a")
        assert not _proven(house, claims, "b" if model == "a" else "a")
        _check_histories(house, agents)
    finally:
        house.end()
    return Outcome(n_requests, n_returns, n_swaps, house.n_starts)


def _round(house: Worker, speakers: list[Agent], n: int, next_model: str | None) -> list[Claim]:
    """All at once, and the change of models in their midst, if there is a `next_model`."""
    with ThreadPoolExecutor(N_SLOTS + 1) as pool:
        turns = [pool.submit(_turn, house, agent, n) for agent in speakers[:-1]]
        loading = pool.submit(_load, house, next_model) if next_model else None
        turns += [pool.submit(_turn, house, agent, n) for agent in speakers[-1:]]
        if loading is not None:
            loading.result()
        return [turn.result() for turn in turns]


def _load(house: Worker, model: str) -> None:
    body = {"preset": model}
    httpx.post(f"{house.url}/v1/models/load", json=body, timeout=WAIT_S).raise_for_status()


def _turn(house: Worker, agent: Agent, n: int) -> Claim:
    """One turn by what is new; what of it was known to the model that answered is reused."""
    new = [{"role": "user", "content": f"turn {n} about {WORDS[n % len(WORDS)]}"}]
    if not agent.messages:
        new = [agent.rules, *new]
    body = {"append": new, "max_tokens": N_TOKENS, "temperature": 0}
    answer = httpx.post(f"{house.url}/v1/agents/{agent.id}/generate", json=body, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    agent.messages += new
    model = reply["model"]
    before = agent.n_prompt.get(reply["model"])
    if before is not None:
        least = 1 if agent.is_shaken else (before - OPENING) // BLOCK * BLOCK
        cached = reply["agent"]["cached_tokens"]
        assert cached >= least, f"{agent.id} at {n}: {cached} of {before} cached"
    claim = Claim(agent.id, model, tuple(agent.messages), _texts(reply))
    agent.n_prompt[model] = reply["usage"]["prompt_tokens"]
    agent.is_shaken = False
    message = reply["choices"][0]["message"]
    agent.messages.append({"role": "assistant", **{k: v for k, v in message.items() if v}})
    return claim


def _proven(house: Worker, claims: list[Claim], model: str) -> list[Claim]:
    """The claims about other models; those about this one are what it answers from cold."""
    for claim in claims:
        if claim.model == model:
            body = {
                "messages": claim.messages,
                "max_tokens": N_TOKENS,
                "temperature": 0,
                "cache_prompt": False,
            }
            cold = httpx.post(f"{house.url}/v1/chat/completions", json=body, timeout=WAIT_S)
            reply = cold.raise_for_status().json()
            assert reply["model"] == model, "it is started again with the model that it had"
            assert _texts(reply) == claim.texts, claim.who
    return [claim for claim in claims if claim.model != model]


def _texts(answer: dict[str, Any]) -> tuple[str, str]:
    message = answer["choices"][0]["message"]
    return message.get("content") or "", message.get("reasoning_content") or ""


def _check_histories(house: Worker, agents: list[Agent]) -> None:
    for agent in agents:
        if not agent.messages:
            continue
        path = f"{house.url}/v1/agents/{agent.id}/history"
        messages = httpx.get(path).raise_for_status().json()["messages"]
        assert [(m["role"], m["content"]) for m in messages] == [
            (m["role"], m.get("content") or "") for m in agent.messages
        ], agent.id
