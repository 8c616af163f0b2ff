"""Work on a client's text and images is bounded by time, and delays no other client."""

import base64
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import httpx
import pytest
from PIL import Image

from mlxstack.features.formats.grammar import client_grammars
from mlxstack.features.vision import image_checks
from mlxstack.service import service as service_module
from mlxstack.text import limited_process
from tests import vision_models
from tests.api.running import Running, running, tiny_preset
from tests.patience import PATIENCE_S, wait_until

pytestmark = [pytest.mark.mlx, pytest.mark.net]
CHAT = "/v1/chat/completions"
N_RULES = 45_000
CHAIN = (
    "\n".join(f"r{i} ::= r{i + 1}" for i in range(N_RULES)) + f'\nr{N_RULES} ::= "a"\nroot ::= r0'
)
"""Grammar that its converter reads in a time that grows with the square of its rules."""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = vision_models.build(tmp_path_factory.mktemp("models") / "vl", "qwen3_vl")
    with running(tiny_preset(folder), tmp_path_factory.mktemp("home")) as found:
        yield found


def asked(text: str = "Hello", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2, **more}


def large(shade: int) -> dict[str, Any]:
    """A progressive JPEG of 12 megapixels, which takes some tenths of a second to decode."""
    out = BytesIO()
    Image.new("RGB", (4000, 3000), (shade, 0, 0)).save(out, "JPEG", progressive=True)
    url = f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def test_large_images_leave_threads_for_others(
    seeing: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_checks, "QUICK_S", 0.05)
    bodies = [
        {"messages": [{"role": "user", "content": [large(at)]}], "max_tokens": 2} for at in range(6)
    ]
    with (
        httpx.Client(base_url=seeing.url, timeout=PATIENCE_S) as http,
        ThreadPoolExecutor(len(bodies)) as pool,
    ):
        answers = [pool.submit(http.post, CHAT, json=body) for body in bodies]
        wait_until(lambda: seeing.service.text_processor._images._slow._began_at)
        assert http.post(CHAT, json=asked("and another")).status_code == 200
        assert not all(one.done() for one in answers), "it did not wait for all of them"
        for one in answers:
            assert one.result().status_code == 200, one.result().text


def test_a_grammar_ends_when_its_client_leaves(
    live: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_grammars, "LIMIT_S", 100 * PATIENCE_S)
    monkeypatch.setattr(limited_process, "STALL_S", 100 * PATIENCE_S)
    compilers = live.service.text_processor.constraints._compilers
    with httpx.Client(base_url=live.url, timeout=0.5) as http, pytest.raises(httpx.ReadTimeout):
        http.post(CHAT, json=asked(grammar=CHAIN))
    wait_until(lambda: not compilers._began_at)


def test_a_grammar_that_takes_long_is_refused_in_words(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_grammars, "LIMIT_S", 0.2)
    for path, body in (
        (CHAT, asked(grammar=CHAIN)),
        ("/completion", {"prompt": "a", "grammar": CHAIN}),
        ("/v1/completions", {"prompt": "a", "grammar": CHAIN}),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert "takes longer than 0.2 s of CPU time" in answer.text
    assert http.post(CHAT, json=asked()).status_code == 200


@pytest.mark.parametrize("at", range(5))
def test_health_tells_which_work_is_stuck(
    live: Running, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(service_module, "TEXT_STALLED_S", 0.0)
    may_end = threading.Event()
    begun = threading.Semaphore(0)

    def work() -> None:
        begun.release()
        may_end.wait(PATIENCE_S)

    threads = live.service.text_processor.threads._members[at]
    jobs = [threads.submit(work) for _ in range(threads._n)]
    for _ in jobs:
        assert begun.acquire(timeout=PATIENCE_S)
    stuck = httpx.get(f"{live.url}/health")
    may_end.set()
    assert stuck.status_code == 503 and f"all threads for {threads.name} are stuck" in stuck.text
    for job in jobs:
        job.result()
    wait_until(lambda: not threads._began_at)
    assert httpx.get(f"{live.url}/health").json() == {"status": "ok"}
