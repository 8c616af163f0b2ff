"""Counting tokens: the very prompt, and never behind somebody's generation."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import pytest

from tests.api.anthropic.shapes import tools
from tests.api.anthropic.speaking import PATH, ask, body, n_prompt
from tests.api.requests import prompt_of
from tests.api.running import Running, single_steps
from tests.api.test_concurrent_streams import n_busy
from tests.patience import PATIENCE_S, wait_until

pytestmark = [pytest.mark.mlx, pytest.mark.net]

COUNT = f"{PATH}/count_tokens"


def test_count_is_the_prompt_of_messages(claude: anthropic.Anthropic, http: httpx.Client) -> None:
    sent = body(prompt_of(40), system="Be kind.", tools=tools(1, 24))
    answer = http.post(COUNT, json=sent)
    assert answer.json() == {"input_tokens": n_prompt(ask(http, sent)["usage"])}
    del sent["max_tokens"], sent["temperature"]
    assert claude.messages.count_tokens(**sent).input_tokens == answer.json()["input_tokens"]


def test_26_parallel_counts_do_not_wait_for_generation(live: Running, http: httpx.Client) -> None:
    """All slots decode, and more requests wait in the queue."""
    long = body(max_tokens=20, ignore_eos=True)
    engine: Any = live.service.engine
    answered = engine.snapshot().counters.n_requests

    def generate(seed: int) -> int:
        sent = {**long, "messages": [{"role": "user", "content": prompt_of(20, seed)}]}
        return httpx.post(live.url + PATH, json=sent, timeout=PATIENCE_S).status_code

    def count(seed: int) -> dict[str, Any]:
        one = {"model": "tiny", "messages": [{"role": "user", "content": "foo"}]}
        return httpx.post(f"{live.url}{COUNT}", json={**one, "tools": tools(1, 24, seed)}).json()

    with ThreadPoolExecutor(32) as pool:
        with single_steps(live) as step:
            working = [pool.submit(generate, seed) for seed in range(5)]
            wait_until(lambda: engine._inbox.qsize() == 5)
            while n_busy(now := engine.snapshot()) < 3 or len(now.waiting) < 2:
                step()
            # The engine stands still between two steps.
            counted = [task.result() for task in [pool.submit(count, seed) for seed in range(26)]]
        assert [task.result() for task in working] == [200] * 5
    assert all(found["input_tokens"] > 20 for found in counted)
    assert live.service.engine.snapshot().counters.n_requests == answered + 5
