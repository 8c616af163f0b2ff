"""A request that is being prepared when the model changes is never answered by the next model."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from mlxstack.core.preset import SlotSpec
from tests import models
from tests.api.running import TINY, Running, running, tiny_preset
from tests.patience import PATIENCE_S, wait_until

pytestmark = [pytest.mark.mlx, pytest.mark.net]

TURN = [{"role": "user", "content": "hello " * 40}]
TEXT = "hello " * 200
DOORS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": TURN, "max_tokens": 4}),
    "chat stream": ("/v1/chat/completions", {"messages": TURN, "max_tokens": 4, "stream": True}),
    "choices": ("/v1/chat/completions", {"messages": TURN, "max_tokens": 4, "n": 2}),
    "completions": ("/v1/completions", {"prompt": [TEXT, TEXT], "max_tokens": 4}),
    "responses": ("/v1/responses", {"input": "hello", "max_output_tokens": 16}),
    "messages": ("/v1/messages", {"messages": TURN, "max_tokens": 4}),
    "completion": ("/completion", {"prompt": TEXT, "n_predict": 4}),
    "agent": ("/v1/agents/ann/generate", {"append": TURN, "max_tokens": 4}),
    "prefix": ("/cache/prefixes", {"name": "head", "text": TEXT}),
    "warm": ("/cache/warm", {"text": TEXT}),
}


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Running]:
    """A service of model a; a preset of model b lies beside it."""
    (tmp_path / "presets").mkdir()
    folders = [models.write(tmp_path / name, TINY, seed) for seed, name in enumerate("ab")]
    text = f"model: {{id: {folders[1]}, alias: model-b}}\nslots: {{count: 2, n_ctx: 1024}}\n"
    (tmp_path / "presets" / "b.yaml").write_text(text)
    preset = structs.replace(tiny_preset(folders[0]), slots=SlotSpec(count=2, n_ctx=1024))
    with running(preset, tmp_path) as found:
        yield found


def test_requests_that_are_being_prepared_are_refused_after_a_swap(
    here: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are in a thread of the tokenizer, the others wait for one."""
    prompt_maker = here.service.text_processor.prompt_maker
    is_changed = threading.Event()

    def slow(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            assert is_changed.wait(PATIENCE_S)
            return work(*args)

        return run

    for name in ("make", "plain", "tokenize"):
        monkeypatch.setattr(prompt_maker, name, slow(getattr(prompt_maker, name)))

    def ask(door: str) -> httpx.Response:
        path, body = DOORS[door]
        return httpx.post(here.url + path, json=body, timeout=PATIENCE_S)

    with ThreadPoolExecutor(len(DOORS)) as pool:
        asked = {door: pool.submit(ask, door) for door in DOORS}
        try:
            wait_until(lambda: here.service.gate.n_inside >= len(DOORS))
            body = {"preset": "b", "drain_s": 0}
            changed = httpx.post(f"{here.url}/v1/models/load", json=body, timeout=PATIENCE_S)
        finally:
            is_changed.set()
        answers = {door: future.result() for door, future in asked.items()}
    assert changed.status_code == 200, changed.text
    for door, answer in answers.items():
        assert answer.status_code == (529 if door == "messages" else 503), (door, answer.text)
        assert "retry-after" in answer.headers and "model" in answer.text, door
    assert httpx.get(f"{here.url}/v1/agents/ann/history").status_code == 404
    assert not httpx.get(f"{here.url}/cache").json()["prefixes"]
    again = ask("chat")
    assert again.status_code == 200 and again.json()["model"] == "model-b"


def test_tokens_are_counted_by_the_model_that_was_asked(
    here: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt_maker = here.service.text_processor.prompt_maker
    is_changed = threading.Event()
    begun = threading.Event()
    make = prompt_maker.make

    def slow(*args: Any) -> Any:
        begun.set()
        assert is_changed.wait(PATIENCE_S)
        return make(*args)

    monkeypatch.setattr(prompt_maker, "make", slow)
    body = {"messages": TURN}
    with ThreadPoolExecutor(1) as pool:
        path = f"{here.url}/v1/messages/count_tokens"
        counting = pool.submit(httpx.post, path, json=body, timeout=PATIENCE_S)
        assert begun.wait(PATIENCE_S)
        try:
            changed = httpx.post(
                f"{here.url}/v1/models/load", json={"preset": "b", "drain_s": 0}, timeout=PATIENCE_S
            )
        finally:
            is_changed.set()
        counted = counting.result()
    assert changed.status_code == 200 and counted.status_code == 200, counted.text
    assert counted.json() == httpx.post(path, json=body, timeout=PATIENCE_S).json()
