"""Names that a shell completes."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlxstack.cli.completion import agent_names
from mlxstack.host.home import HOME_VARIABLE, Home, make_home
from mlxstack.host.process import identify
from mlxstack.host.services import Phase, ServiceSpec, ServiceState, claim
from tests.cli.terminal import Shell

pytestmark = pytest.mark.net

NAMES = ("one", "two", "three")


@contextmanager
def listing(agent: str, all_asked: threading.Barrier) -> Iterator[str]:
    """The address of a service that lists an agent once the others are asked too."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            all_asked.wait()
            body = f'{{"data": [{{"id": "{agent}"}}]}}'.encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        all_asked.abort()
        server.shutdown()
        thread.join()
        server.server_close()


def test_agents_of_all_services_are_asked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path)
    own = identify(os.getpid())
    assert own is not None
    make_home(home)
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    all_asked = threading.Barrier(len(NAMES))
    with ExitStack() as held:
        for name in NAMES:
            url = held.enter_context(listing(f"agent-{name}", all_asked))
            spec = ServiceSpec(name, str(tmp_path), name, url, ())
            claim(ServiceState(spec, Phase.RUNNING, own))
        assert agent_names() == sorted(f"agent-{name}" for name in NAMES)


def test_the_tiers_of_a_key_are_completed(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    typed = {"COMP_WORDS": "mlx-stack key --tier ", "COMP_CWORD": "3"}
    completed = shell.run(_MLX_STACK_COMPLETE="complete_bash", **typed)
    assert completed.stdout.split() == ["high", "normal", "low"]
