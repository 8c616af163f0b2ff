"""A chat template that loops in long conversations costs those, and nothing else."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from mlxstack.core.preset import SamplingSpec
from mlxstack.demo import MODEL_DIR
from mlxstack.service import service as service_module
from mlxstack.service.parts.text_processor import N_THREADS
from mlxstack.text.rendering import renderers as template_rendering
from tests.api.running import Running, running, tiny_preset
from tests.patience import PATIENCE_S

LATE = (
    "{% if messages|length > 8 %}{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}{% endif %}"
)
SHORT = [{"role": "user", "content": "Hello"}]
LONG = [{"role": ("user", "assistant")[at % 2], "content": f"turn {at}"} for at in range(9)]
PATHS = {
    "/v1/chat/completions": {"max_tokens": 3},
    "/v1/messages": {"max_tokens": 3},
    "/v1/messages/count_tokens": {},
    "/apply-template": {},
    "/api/chat": {"stream": False},
}


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service whose template passes every probe."""
    folder = tmp_path_factory.mktemp("late") / "tiny"
    preset = tiny_preset(folder, sampling=SamplingSpec(max_tokens=3))
    source = (MODEL_DIR / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(LATE + source)
    with running(preset, tmp_path_factory.mktemp("home")) as found:
        yield found


def n_overruns(http: httpx.Client) -> float:
    lines = http.get("/metrics").text.splitlines()
    return next(
        float(one.split()[-1]) for one in lines if "overruns_total " in one and one[0] != "#"
    )


@pytest.mark.parametrize(
    ("path", "n_sent"), [(path, 1 if n else 2 * N_THREADS) for n, path in enumerate(PATHS)]
)
def test_a_conversation_without_end_is_refused_and_the_others_are_served(
    late: Running, path: str, n_sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_rendering, "LIMIT_S", 0.5)

    def send(messages: list[dict[str, str]]) -> httpx.Response:
        body: dict[str, Any] = {"model": "tiny", "messages": messages, **PATHS[path]}
        return http.post(path, json=body)

    def grown(at: int) -> list[dict[str, str]]:
        return [*LONG, {"role": "user", "content": f"{path} {at}"}]

    with httpx.Client(base_url=late.url, timeout=PATIENCE_S) as http:
        before = n_overruns(http)
        with ThreadPoolExecutor(n_sent) as pool:
            refused = list(pool.map(send, [grown(at) for at in range(n_sent)]))
        too_long = [answer for answer in refused if answer.status_code == 400]
        for answer in refused:
            # Slow ones beyond two at a time are asked to come again.
            expected = "takes longer than" if answer in too_long else "the chat template is slow"
            assert expected in answer.text, answer.text
        assert too_long and n_overruns(http) == before + len(too_long)
        assert send(SHORT).status_code in (200, 201)
        assert http.get("/health").json() == {"status": "ok"}


def test_health_tells_that_every_text_thread_is_stuck(
    late: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "TEXT_STALLED_S", 0.0)
    may_end = threading.Event()
    begun = threading.Semaphore(0)

    def work() -> None:
        begun.release()
        may_end.wait(PATIENCE_S)

    text_processor = late.service.text_processor
    jobs = [text_processor._prompts.submit(work) for _ in range(N_THREADS)]
    for _ in jobs:
        assert begun.acquire(timeout=PATIENCE_S)
    stuck = httpx.get(f"{late.url}/health")
    may_end.set()
    assert stuck.status_code == 503 and "all threads for prompts are stuck" in stuck.text
    for job in jobs:
        job.result()
    assert httpx.get(f"{late.url}/health").json() == {"status": "ok"}
