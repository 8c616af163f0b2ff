"""A9: which looks at a worker mean that it is stuck."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mlxstack.control.supervisor import HealthProbe, LivenessMonitor, probe
from mlxstack.host.restart_policy import RestartPolicy
from tests.ports import unused_port

PATIENCE = RestartPolicy(look_s=5.0, silent_s=20.0, stuck_s=40.0)
WELL = HealthProbe(is_well=True, message="")
LOADING = HealthProbe(is_well=True, message="Loading model")
STALLED = HealthProbe(message="the engine has work but finishes no turn")
SILENT = HealthProbe()


class Answers(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        status, body = self.server.says  # type: ignore[attr-defined]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.net
@pytest.mark.parametrize(
    ("status", "body", "beat"),
    [
        (200, b'{"status": "ok"}', WELL),
        (403, b"no", WELL),
        (503, b'{"error": {"message": "Loading model"}}', LOADING),
        (503, b'{"error": {"message": "stuck"}}', HealthProbe(message="stuck")),
        (500, b"oops", HealthProbe(message="")),
    ],
)
def test_a9_what_an_answer_tells(
    server: ThreadingHTTPServer, status: int, body: bytes, beat: HealthProbe
) -> None:
    server.says = (status, body)  # type: ignore[attr-defined]
    assert probe(f"http://127.0.0.1:{server.server_address[1]}", 5.0) == beat


@pytest.mark.net
def test_a9_nobody_there_is_silence() -> None:
    assert probe(f"http://127.0.0.1:{unused_port()}", 5.0) == SILENT


def felt(*beats: HealthProbe) -> list[str | None]:
    monitor = LivenessMonitor(PATIENCE)
    return [monitor.observe(beat) for beat in beats]


def test_a9_loading_may_last() -> None:
    assert set(felt(*[LOADING] * 500)) == {None}


@pytest.mark.parametrize("first", [WELL, LOADING, STALLED])
def test_a9_silence_after_a_word_is_the_end(first: HealthProbe) -> None:
    assert felt(first, *[SILENT] * 4) == [None] * 4 + ["has not answered for 20 s"]


def test_a9_one_answer_breaks_a_silence() -> None:
    assert set(felt(WELL, *[SILENT] * 3, WELL, *[SILENT] * 3, STALLED)) == {None}


def test_a9_at_first_silence_may_last_longer() -> None:
    found = felt(*[SILENT] * 8)
    assert found == [None] * 7 + ["was unhealthy for 40 s (it has not answered)"]


def test_a9_a_stalled_engine_has_the_time_to_recover() -> None:
    assert set(felt(WELL, *[STALLED] * 7, WELL, *[STALLED] * 7)) == {None}
    assert felt(*[STALLED] * 8)[-1] == (
        "was unhealthy for 40 s (last error: the engine has work but finishes no turn)"
    )


def test_a9_silence_and_complaints_add_up() -> None:
    assert felt(WELL, *[STALLED, SILENT] * 4)[-1] is not None
