"""Models behind a gateway with room for one: `python -m tests.endurance.thrash CLIENTS REQUESTS`.

Clients change the model with every request, streamed or whole. Each answer is the one from cold or
a 503 with Retry-After, each stream comes to its end, no worker ends, and members that are in
memory, or on their way in or out, fit the budget. Some request is answered within `PATIENCE_S`.
"""

import asyncio
import json
import re
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
import yaml
from msgspec import Struct

from tests import models
from tests.gateway.real_members import Site, serving
from tests.patience import PATIENCE_S

CONFIGS = {"llama": models.LLAMA, "sliding": models.SLIDING, "hybrid": models.HYBRID}
MEMORY = "180MB"
"""Room for any of the models, and for no two of them."""

N_QUESTIONS = 3
N_TOKENS = 8
LOOK_S = 0.05
PAUSE_S = 0.2
CHAT = "/v1/chat/completions"


class ThrashOutcome(Struct, frozen=True):
    """Answers that are right, refusals in words, loads of all members, and the most bytes held.

    `n_rss` are the bytes of all processes before the clients and after them.
    """

    n_answers: int
    n_refused: int
    n_loads: int
    n_reserved: int
    budget: int
    n_rss: tuple[int, int]


def thrash(folder: Path, n_clients: int, n_requests: int) -> ThrashOutcome:
    """`n_requests` of each client. Raises AssertionError."""
    with serving(folder, _presets(folder), MEMORY) as site:
        return asyncio.run(_Crowd(site).run(n_clients, n_requests))


def _presets(folder: Path) -> list[str]:
    files = []
    for name, config in CONFIGS.items():
        model = models.write(folder / name, {**config, "vocab_size": 1024})
        server = {"port": 0, "startup_timeout_s": 120, "drain_s": 1}
        slots = {"count": 2, "n_ctx": 1024}
        preset = {"name": name, "model": {"id": str(model)}, "server": server, "slots": slots}
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(preset))
        files.append(str(file))
    return files


class _Crowd:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._expected: dict[tuple[str, int], str] = {}
        self._n_answers = self._n_refused = self._n_reserved = 0
        self._answered_at = time.monotonic()

    async def run(self, n_clients: int, n_requests: int) -> ThrashOutcome:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._site.url, timeout=PATIENCE_S, limits=limits
        ) as self._http:
            for key in product(CONFIGS, range(N_QUESTIONS)):
                self._expected[key] = await self._once(*key, is_stream=False, cache_prompt=False)
            before = self._workers()
            rss = self._rss()
            watching = asyncio.create_task(self._watch())
            await asyncio.gather(*(self._client(n, n_requests) for n in range(n_clients)))
            watching.cancel()
            assert self._workers() == before, "a worker ended"
            return ThrashOutcome(
                self._n_answers, self._n_refused, await self._n_loads(), self._n_reserved,
                self._site.spec.budget, (rss, self._rss()),
            )  # fmt: skip

    async def _client(self, number: int, n_requests: int) -> None:
        random = Random(number)
        names = list(CONFIGS)
        for n in range(n_requests):
            model = names[(number + n) % len(names)]
            question = random.randrange(N_QUESTIONS)
            text = await self._once(model, question, is_stream=random.random() < 0.5)
            assert text == self._expected[model, question], (model, text)
            self._n_answers += 1

    async def _once(self, model: str, question: int, *, is_stream: bool, **more: Any) -> str:
        """Text of an answer, asked for again after each refusal."""
        text = f"Question {question}. " + "Say hello to everybody in this room. " * 12
        body = {"model": model, "messages": [{"role": "user", "content": text}]}
        body |= {"max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True, **more}
        while True:
            answer = await self._http.post(CHAT, json=body | {"stream": is_stream})
            if answer.status_code == 200:
                chunks = _chunks(answer.text) if is_stream else [answer.json()]
                if "error" not in chunks[-1]:
                    self._answered_at = time.monotonic()
                    return "".join(_text(chunk) for chunk in chunks)
                # The head was sent while the request waited for its model.
                assert chunks[-1]["error"]["code"] == "overloaded", chunks[-1]
            else:
                assert answer.status_code == 503, answer.text
                assert "retry-after" in answer.headers, answer.text
            assert time.monotonic() < self._answered_at + PATIENCE_S, answer.text
            self._n_refused += 1
            await asyncio.sleep(PAUSE_S)

    async def _watch(self) -> None:
        """Note the most bytes that members hold at once."""
        while True:
            cards = (await self._http.get("/v1/models")).raise_for_status().json()["data"]
            held = sum(card["n_bytes"] for card in cards if card["status"]["value"] != "unloaded")
            self._n_reserved = max(self._n_reserved, held)
            assert held <= self._site.spec.budget
            await asyncio.sleep(LOOK_S)

    async def _n_loads(self) -> int:
        metrics = (await self._http.get("/metrics")).raise_for_status().text
        return sum(int(n) for n in re.findall(r"mlxstack_gateway_loads_total\{.*\} (\d+)", metrics))

    def _workers(self) -> dict[str, int]:
        pids = {}
        for name in CONFIGS:
            worker = self._site.state(name).worker
            assert worker is not None
            pids[name] = worker.pid
        return pids

    def _rss(self) -> int:
        return sum(psutil.Process(pid).memory_info().rss for pid in self._workers().values())


def _chunks(stream: str) -> list[dict[str, Any]]:
    """Chunks of a stream that came to its end, the last one an error or not."""
    data = [line.removeprefix("data: ") for line in stream.splitlines() if line[:5] == "data:"]
    chunks = [json.loads(chunk) for chunk in data if chunk != "[DONE]"]
    assert data[-1] == "[DONE]" or "error" in chunks[-1], stream
    return chunks


def _text(chunk: dict[str, Any]) -> str:
    """Thought and content of an answer, or of a chunk of it."""
    parts = [choice.get("message") or choice["delta"] for choice in chunk["choices"]]
    return "".join((p.get("reasoning_content") or "") + (p.get("content") or "") for p in parts)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]] or [300, 20]
    print(thrash(Path(tempfile.mkdtemp(prefix="thrash-")), *numbers), flush=True)
