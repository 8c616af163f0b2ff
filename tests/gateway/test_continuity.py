"""An agent goes on, token by token, over all that a gateway does to its model."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.gateway.real_members import Site, serving, until, write_presets
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

MEMORY = "130MB"
"""Room for one of the two chat models."""

PLAIN = {"chat_template_kwargs": {"enable_thinking": False}, "temperature": 0, "max_tokens": 8}
RULES = {"role": "system", "content": " ".join(f"w{(i * 17) % 97}" for i in range(80))}
WORDS = ("Hello!", "And then?", "Why?", "Where?", "Who?", "When?")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("continuity")
    files = write_presets(folder, {"port": 0, "idle_unload_s": 600})[:2]
    with serving(folder, files, MEMORY, 0.1) as two_members:
        yield two_members


@pytest.fixture
def http(site: Site) -> Iterator[httpx.Client]:
    retrying = httpx.HTTPTransport(retries=20)
    with httpx.Client(base_url=site.url, timeout=PATIENCE_S, transport=retrying) as client:
        yield client


def said(http: httpx.Client, text: str, **more: Any) -> tuple[str, int]:
    """The next answer to the agent, and its tokens from the cache."""
    append = [RULES] * bool(more) + [{"role": "user", "content": text}]
    body = {"append": append, **PLAIN, **more}
    # Not from the headers: those of an answer that waits for a model come before its numbers.
    answer = http.post("/v1/agents/ann/generate", json=body).raise_for_status().json()
    assert answer["agent"]["id"] == "ann"
    return answer["choices"][0]["message"]["content"], answer["agent"]["cached_tokens"]


def kill(site: Site, http: httpx.Client, name: str) -> None:
    before = site.state(name).worker
    assert before is not None
    os.kill(before.pid, signal.SIGKILL)

    def is_back() -> bool:
        state = site.state(name)
        return state.worker is not None and state.worker.pid != before.pid

    until(is_back, f"{name} does not start again")
    until(lambda: _answers(http), "the gateway does not answer")


def _answers(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_the_turns_of_an_agent_are_those_of_a_cold_conversation(
    site: Site, http: httpx.Client
) -> None:
    answers = [said(http, WORDS[0], model="demo")]
    http.post("/api/generate", json={"model": "demo", "keep_alive": 0}).raise_for_status()
    until(lambda: site.models()["demo"]["status"] == {"value": "unloaded"}, "it stays")
    answers.append(said(http, WORDS[1]))
    to_tiny = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **PLAIN}
    http.post("/v1/chat/completions", json=to_tiny).raise_for_status()
    assert site.models()["demo"]["status"] == {"value": "unloaded"}, "there was room for both"
    answers.append(said(http, WORDS[2]))
    kill(site, http, "front")
    answers.append(said(http, WORDS[3]))
    kill(site, http, "demo")
    answers.append(said(http, WORDS[4]))
    supervisor = site.state("demo").supervisor
    worker = site.state("demo").worker
    assert worker is not None
    os.kill(worker.pid, signal.SIGKILL)
    http.post("/v1/chat/completions", json=to_tiny).raise_for_status()
    # Its worker ended before it could unload; the next one is asked, and the process goes on.
    assert site.models()["demo"]["status"] == {"value": "unloaded"}
    assert site.state("demo").supervisor == supervisor and site.state("demo").worker != worker
    answers.append(said(http, WORDS[5]))
    assert all(n_cached > 40 for _, n_cached in answers[1:])
    talk = [RULES]
    for text, (answer, _) in zip(WORDS, answers, strict=False):
        talk.append({"role": "user", "content": text})
        cold = {"model": "demo", "messages": talk, "cache_prompt": False, **PLAIN}
        recomputed = http.post("/v1/chat/completions", json=cold).raise_for_status().json()
        assert recomputed["choices"][0]["message"]["content"] == answer
        talk.append({"role": "assistant", "content": answer})
    history = http.get("/v1/agents/ann/history").json()["messages"]
    assert [(message["role"], message["content"]) for message in history] == [
        (message["role"], message["content"]) for message in talk
    ]
