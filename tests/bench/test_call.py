"""A stream becomes times and texts, however the network cuts it; who is called with which key."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from mlxstack.bench.dev.serving_scenarios import decode_rate
from mlxstack.bench.dev.timed_request import TimedRequest, timed
from mlxstack.cli.main import app
from mlxstack.client.types import CallUsage
from mlxstack.core.errors import Broken


def event(**chunk: object) -> bytes:
    return b"data: " + msgspec.json.encode({"id": "x", **chunk}) + b"\n\n"


def said(text: str, key: str = "content") -> bytes:
    return event(choices=[{"index": 0, "delta": {key: text}}])


STREAM = (
    b": keepalive\n\n"
    + event(choices=[{"index": 0, "delta": {"role": "assistant"}}])
    + said("hm", "reasoning_content")
    + said("Hel\u2028lo")
    + said(" you")
    + event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
    + event(
        choices=[],
        usage={
            "prompt_tokens": 9,
            "completion_tokens": 3,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    )
    + b"data: [DONE]\n\n"
)


@given(st.sets(st.integers(1, len(STREAM) - 1)))
def test_where_the_network_cuts_does_not_matter(cuts: set[int]) -> None:
    ends = [*sorted(cuts), len(STREAM)]
    starts = [0, *sorted(cuts)]
    pieces = [STREAM[a:b] for a, b in zip(starts, ends, strict=True)]
    found = timed(0.0, [(float(i + 1), piece) for i, piece in enumerate(pieces)], 99.0)
    assert found.text == "hmHel\u2028lo you"
    assert len(found.marks) == 3
    assert list(found.marks) == sorted(found.marks)
    assert found.usage.cached_tokens == 4
    assert found.n_computed == 5


def test_times_are_those_of_the_last_byte() -> None:
    first = said("a")
    second = said("b")
    found = timed(1.0, [(2.0, first + second[:9]), (5.0, second[9:])], 6.0)
    assert found.marks == (2.0, 5.0)
    assert found.ttft_s == 1.0
    assert found.latency_s == 5.0
    assert found.gaps == (3.0,)


def test_gaps_within_a_window_are_those_that_touch_it() -> None:
    found = TimedRequest(0.0, (1.0, 2.0, 4.0, 7.0), 8.0)
    assert found.gaps_within(2.5, 3.0) == (2.0,)
    assert found.gaps_within(2.5, 5.0) == (2.0, 3.0)
    assert found.gaps_within(7.5, 9.0) == ()


def test_an_answer_without_text_has_its_first_token_at_the_end() -> None:
    assert TimedRequest(1.0, (), 4.0).ttft_s == 3.0


def test_a_stream_of_something_else_is_refused() -> None:
    with pytest.raises(Broken, match="unexpected"):
        timed(0.0, [(1.0, b"data: <html>\n\n")], 2.0)


def test_decode_rate_counts_only_while_all_are_answered() -> None:
    one = TimedRequest(0.0, (1.0, 2.0, 3.0, 4.0), 4.0)
    late = TimedRequest(0.0, (2.0, 2.5, 3.0, 3.5, 4.0, 9.0), 9.0)
    assert decode_rate([one, late]) == (2 + 4) / 2.0
    assert decode_rate([one, TimedRequest(0.0, (), 1.0)]) == 0.0


def test_pieces_of_several_tokens_count_as_many() -> None:
    usage = CallUsage(completion_tokens=8)
    one = TimedRequest(0.0, (1.0, 2.0, 3.0, 4.0), 4.0, usage)
    assert decode_rate([one]) == 3 * 2 / 3.0


@contextmanager
def server(status: int, keys: list[str | None]) -> Iterator[str]:
    """A server that answers everything with STREAM; `keys` are those that it was called with."""

    class Answers(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Quiet."""

        def do_POST(self) -> None:
            keys.append(self.headers["authorization"])
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-length", str(len(STREAM)))
            self.end_headers()
            self.wfile.write(STREAM)

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()
        thread.join()


@pytest.mark.net
def test_the_other_server_never_sees_our_key() -> None:
    ours: list[str | None] = []
    theirs: list[str | None] = []
    with server(200, ours) as url, server(500, theirs) as vs:
        args = ["bench", "dev", "serve", "--small", "--url", url, "--vs", vs]
        done = CliRunner().invoke(app, args, env={"MLX_STACK_API_KEY": "sesame"})
    assert isinstance(done.exception, Broken)
    assert set(ours) == {"Bearer sesame"}
    assert set(theirs) == {None}
