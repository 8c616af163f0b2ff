"""Many clients at once on three slots: queueing, pinning, leaving, heartbeats."""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from mlxstack.core.engine_snapshot import Snapshot
from tests.api.requests import chat, chat_body, prompt_of
from tests.api.running import Running, busy_engine, single_steps, unanswered
from tests.patience import PATIENCE_S, wait_until
from tests.repetition import in_soak

pytestmark = [pytest.mark.mlx, pytest.mark.net]

PATH = "/v1/chat/completions"
LONG = {"max_tokens": 700, "ignore_eos": True}
LOOKS_PER_STEP = 50
SHORTER = {**LONG, "max_tokens": 300}


def until(live: Running, is_so: Callable[[Snapshot], bool]) -> Snapshot:
    """The first snapshot of which this is true."""

    def found() -> Snapshot | None:
        snapshot = live.service.engine.snapshot()
        return snapshot if is_so(snapshot) else None

    snapshot = wait_until(found, live.service.engine.snapshot)
    assert snapshot is not None
    return snapshot


def step_until(live: Running, step: Callable[[], None], is_so: Callable[[Snapshot], bool]) -> None:
    """Let a stopped engine take two steps for each message, until this is true.

    A message that comes between the two is due a third step, hence two more now and then.
    """
    engine: Any = live.service.engine
    looks = itertools.count(1)

    def is_reached() -> bool:
        if not is_so(engine.snapshot()) and (
            not engine._inbox.empty() or next(looks) % LOOKS_PER_STEP == 0
        ):
            # The first one may stop again between the message and the step for it.
            step()
            step()
        return is_so(engine.snapshot())

    wait_until(is_reached, engine.snapshot)


def n_busy(snapshot: Snapshot) -> int:
    return sum(slot.state in ("prefilling", "running") for slot in snapshot.slots)


def post(live: Running, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(live.url + PATH, json=body, timeout=PATIENCE_S)


@contextmanager
def held(live: Running) -> Iterator[None]:
    """A request that decodes in slot 0; its client leaves at the end of the block."""
    body = chat_body(id_slot=0, max_tokens=980, ignore_eos=True)
    with unanswered(live.url + PATH, body):
        until(live, lambda s: s.slots[0].state == "running")
        yield


def test_b7_the_fourth_of_four_waits_and_completes(live: Running, http: httpx.Client) -> None:
    long_enough = {**LONG, "max_tokens": 80}
    bodies = [chat_body(prompt_of(20, seed), **long_enough) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        with single_steps(live) as step:
            answers = [pool.submit(post, live, body) for body in bodies]
            step_until(live, step, lambda s: len(s.waiting) == 1 and n_busy(s) == 3)
            metrics = http.get("/metrics").text
            all_busy = http.get("/slots?fail_on_no_slot=1")
        found = [answer.result() for answer in answers]
    assert [answer.status_code for answer in found] == [200] * 4
    assert "llamacpp:requests_deferred 1.0" in metrics
    assert "llamacpp:requests_processing 3.0" in metrics
    assert all_busy.status_code == 503
    assert all_busy.json()["error"]["message"] == "no slot available"
    alone = [chat(http, prompt_of(20, seed), **long_enough) for seed in range(4)]
    assert [a.json()["choices"] for a in found] == [a["choices"] for a in alone]


def test_b6_a_pinned_request_waits_for_its_slot(live: Running, http: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        with held(live):
            second = pool.submit(post, live, chat_body("another", id_slot=0))
            waiting = until(live, lambda s: len(s.waiting) == 1)
            assert waiting.waiting[0].pin == 0
            assert n_busy(waiting) == 1
        assert second.result().status_code == 200
    assert second.result().headers["x-mlx-stack-slot"] == "0"


def test_x9_e11_a_client_that_leaves_frees_its_slot(live: Running, http: httpx.Client) -> None:
    cancelled = live.service.engine.snapshot().counters.n_cancelled
    with http.stream("POST", PATH, json=chat_body(stream=True, **LONG)) as answer:
        lines = answer.iter_lines()
        for _ in range(8):
            next(lines)
    after = until(live, lambda s: n_busy(s) == 0)
    assert after.counters.n_cancelled == cancelled + 1
    again = http.post(PATH, json=chat_body())
    assert int(again.headers["x-mlx-stack-cache-prefix-tokens"]) > 5, "its KV stays as cache"


def test_x9_a_client_that_leaves_without_a_stream(live: Running, http: httpx.Client) -> None:
    cancelled = live.service.engine.snapshot().counters.n_cancelled
    with unanswered(live.url + PATH, chat_body(**LONG)):
        until(live, lambda s: n_busy(s) == 1)
    after = until(live, lambda s: n_busy(s) == 0)
    assert after.counters.n_cancelled == cancelled + 1


def test_x9_a_client_that_leaves_the_queue(live: Running, http: httpx.Client) -> None:
    with held(live):
        with unanswered(live.url + PATH, chat_body("second", id_slot=0)):
            until(live, lambda s: len(s.waiting) == 1)
        assert n_busy(until(live, lambda s: not s.waiting)) == 1


def test_x9_a_client_that_leaves_before_its_stream_began(live: Running, http: httpx.Client) -> None:
    body = chat_body("second", id_slot=0, stream=True)
    with held(live), single_steps(live) as step:
        with unanswered(live.url + PATH, body):
            step_until(live, step, lambda s: len(s.waiting) == 1)
        step_until(live, step, lambda s: not s.waiting)
        assert n_busy(live.service.engine.snapshot()) == 1


def test_x20_headers_come_though_it_waits(live: Running, http: httpx.Client) -> None:
    """With the slot taken, a stream begins with a heartbeat instead of cache numbers."""
    body = chat_body("second", id_slot=0, stream=True, stream_options={"include_usage": True})
    with ExitStack() as stack:
        with held(live), busy_engine(live):
            answer = stack.enter_context(http.stream("POST", PATH, json=body))
        text = "".join(answer.iter_text())
    assert answer.status_code == 200
    assert "x-mlx-stack-slot" not in answer.headers
    assert ": keepalive 0/" in text
    assert '"cached_tokens":' in text
    assert text.endswith("data: [DONE]\n\n")


def test_e12_asks_of_one_agent_run_one_after_another(live: Running, http: httpx.Client) -> None:
    def ask(seed: int) -> dict[str, Any]:
        return chat_body(prompt_of(20, seed), session_id="same", max_tokens=40, ignore_eos=True)

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(post, live, ask(seed)) for seed in range(2)]
        most = 0
        while not all(answer.done() for answer in answers):
            most = max(most, n_busy(live.service.engine.snapshot()))
    assert [answer.result().status_code for answer in answers] == [200, 200]
    assert most == 1


def test_b12_a_decoding_slot_shows_its_progress(live: Running, http: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, live, chat_body(id_slot=1, **SHORTER))
        until(live, lambda s: s.slots[1].n_decoded > 5)
        one = http.get("/slots").json()[1]
        until(live, lambda s: s.slots[1].n_decoded > 100)
        two = http.get("/slots").json()[1]
        running.result()
    assert one["is_processing"] is two["is_processing"] is True
    assert two["next_token"][0]["n_decoded"] > one["next_token"][0]["n_decoded"]
    assert one["id_task"] == two["id_task"] > 0


@pytest.mark.parametrize("action", ["erase", *in_soak("save", "restore")])
def test_x9_a_slot_action_whose_client_left_is_not_done(
    live: Running, http: httpx.Client, action: str
) -> None:
    chat(http, prompt_of(40), id_slot=1)
    http.post("/slots/1?action=save", json={"filename": "other"}).raise_for_status()
    engine: Any = live.service.engine
    with ThreadPoolExecutor(1) as pool:
        with single_steps(live) as step:
            first = pool.submit(post, live, chat_body(id_slot=0, **SHORTER))
            step_until(live, step, lambda s: n_busy(s) == 1)
            name = "other" if action == "restore" else "left"
            with unanswered(f"{live.url}/slots/0?action={action}", {"filename": name}):
                step_until(live, step, lambda _: bool(engine.loaded.loop._state.actions))
                opened = tuple(engine._open)
            wait_until(lambda: any(one.cancelled() for one in opened))
        until(live, lambda _: not engine.loaded.loop._state.actions)
        n_tokens = first.result().json()["usage"]["total_tokens"]
    # What waited for the slot comes before those who come now.
    http.post("/slots/0?action=save", json={"filename": "after"}).raise_for_status()
    assert abs(http.get("/slots").json()[0]["n_tokens"] - n_tokens) <= 1
    missing = http.post("/slots/2?action=restore", json={"filename": "left"})
    assert missing.status_code == 404
