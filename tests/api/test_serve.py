"""The process: it binds, loads, drains on SIGTERM, and says why when it cannot start."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import msgspec
import pytest

from mlxstack.core.preset import ModelSpec, Preset, ServerSpec
from tests.api import serve_process
from tests.api.requests import chat_body
from tests.api.running import tiny_preset
from tests.forked import ROOT
from tests.patience import PATIENCE_S, wait_until
from tests.ports import unused_port

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]


@contextmanager
def process(preset: Preset, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "preset.json").write_bytes(msgspec.json.encode(preset))
    arguments = str(tmp_path / "preset.json"), str(tmp_path / "home")
    command = [sys.executable, "-m", serve_process.MODULE, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as found:
        try:
            yield found
        finally:
            found.kill()


def wait_for(url: str) -> None:
    with httpx.Client(base_url=url) as http:

        def is_healthy() -> bool:
            with suppress(httpx.TransportError):
                return http.get("/health").status_code == 200
            return False

        wait_until(is_healthy)


def test_e16_sigterm_lets_running_requests_finish(model_folder: Path, tmp_path: Path) -> None:
    port = unused_port()
    preset = tiny_preset(model_folder, server=ServerSpec(port=port, drain_s=60))
    url = f"http://127.0.0.1:{port}"
    with process(preset, tmp_path) as found:
        wait_for(url)
        body = {**chat_body(max_tokens=400, ignore_eos=True), "stream": True}
        with httpx.stream(
            "POST", url + "/v1/chat/completions", json=body, timeout=PATIENCE_S
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            found.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert "data: [DONE]" in rest
        assert found.wait(PATIENCE_S) == 0
        assert "Traceback" not in (found.stderr.read() if found.stderr else "")


def test_a_missing_model_is_one_clear_line(tmp_path: Path) -> None:
    preset = Preset(model=ModelSpec(id=str(tmp_path / "none")), server=ServerSpec(port=0))
    with process(preset, tmp_path) as found:
        assert found.wait(PATIENCE_S) == 78
        said = found.stderr.read() if found.stderr else ""
    errors = [line for line in said.splitlines() if line.startswith("ERROR")]
    assert len(errors) == 1
    assert str(tmp_path / "none") in errors[0]
    assert "Traceback" not in said


def test_a15_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        preset = Preset(model=ModelSpec(id="demo"), server=ServerSpec(port=port))
        with process(preset, tmp_path) as found:
            assert found.wait(PATIENCE_S) == 78
            said = found.stderr.read() if found.stderr else ""
    assert f"127.0.0.1:{port}" in said
    assert "server.port" in said


def test_c6_a_saved_slot_survives_the_process(model_folder: Path, tmp_path: Path) -> None:
    port = unused_port()
    preset = tiny_preset(model_folder, server=ServerSpec(port=port))
    url = f"http://127.0.0.1:{port}"
    first = chat_body("remember this", id_slot=0)
    answers = []
    for action, slot in (("save", 0), ("restore", 2)):
        with (
            process(preset, tmp_path) as found,
            httpx.Client(base_url=url, timeout=PATIENCE_S) as http,
        ):
            wait_for(url)
            if action == "save":
                answers.append(http.post("/v1/chat/completions", json=first).json())
            done = http.post(f"/slots/{slot}?action={action}", json={"filename": "kept"}).json()
            if action == "restore":
                again = chat_body("remember this", id_slot=2)
                answers.append(http.post("/v1/chat/completions", json=again).json())
            found.send_signal(signal.SIGTERM)
            assert found.wait(PATIENCE_S) == 0
    assert done["n_restored"] > 8
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[1]["timings"]["prompt_n"] == 1
