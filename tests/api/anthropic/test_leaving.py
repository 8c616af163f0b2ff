"""Clients that leave, and clients that must wait."""

from contextlib import ExitStack

import httpx
import pytest

from tests.api.anthropic.speaking import PATH, ask, body, events, in_order, n_prompt
from tests.api.running import Running, busy_engine, unanswered
from tests.api.test_concurrent_streams import held, n_busy, until

pytestmark = [pytest.mark.mlx, pytest.mark.net]

LONG = {"max_tokens": 900, "ignore_eos": True}


def test_x9_leaving_a_stream_frees_the_slot(live: Running, http: httpx.Client) -> None:
    before = live.service.engine.snapshot().counters
    with http.stream("POST", PATH, json=body(stream=True, **LONG)) as answer:
        lines = answer.iter_lines()
        for _ in range(12):
            next(lines)
    after = until(live, lambda s: n_busy(s) == 0).counters
    assert after.n_cancelled == before.n_cancelled + 1
    assert ask(http, body())["usage"]["cache_read_input_tokens"] > 5, "its KV stays as cache"


def test_x9_leaving_a_whole_answer_frees_the_slot(live: Running, http: httpx.Client) -> None:
    cancelled = live.service.engine.snapshot().counters.n_cancelled
    with unanswered(live.url + PATH, body(**LONG)):
        until(live, lambda s: n_busy(s) == 1)
    after = until(live, lambda s: n_busy(s) == 0)
    assert after.counters.n_cancelled == cancelled + 1


def test_x20_x21_a_stream_that_waits_begins_with_a_ping(live: Running, http: httpx.Client) -> None:
    late = body("second", id_slot=0, stream=True)
    with ExitStack() as stack:
        with held(live), busy_engine(live):
            answer = stack.enter_context(http.stream("POST", PATH, json=late))
        found = events("".join(answer.iter_text()))
    in_order(found)
    assert "x-mlx-stack-slot" not in answer.headers
    assert found[0] == {"type": "ping"}
    last = next(event for event in found if event["type"] == "message_delta")
    assert n_prompt(last["usage"]) > 5
