"""Tapes: what was recorded is what is replayed."""

import asyncio
import stat
from pathlib import Path

import msgspec
import pytest

from mlxstack.client.types import FeedLost
from mlxstack.core.errors import BadRequest
from mlxstack.core.status import StatusFrame
from mlxstack.tui.app import Dashboard
from mlxstack.tui.feed import frame_in
from mlxstack.tui.recording import (
    RecordingFeed,
    RecordingWriter,
    ended,
    new_recording,
    read_recording,
)
from mlxstack.tui.theme import ThemeChoice
from tests.tui import scenes

TAPE = Path(__file__).parent / "tapes" / "demo.jsonl"


async def test_a_recording_is_its_feed(tmp_path: Path) -> None:
    path = tmp_path / "one.tape"
    with new_recording(path) as file:
        passed = [
            one
            async for one in RecordingWriter(RecordingFeed("x", scenes.disconnected()), file).news()
        ]
    assert tuple(passed) == scenes.disconnected() == read_recording(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_tape_over_an_old_file_is_its_owners_too(tmp_path: Path) -> None:
    path = tmp_path / "one.tape"
    path.write_text("old")
    path.chmod(0o644)
    with new_recording(path) as file:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        file.write(b"new")
    assert path.read_text() == "new"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device is always full")
async def test_a_full_disk_ends_the_dashboard_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    with new_recording(Path("/dev/full")) as file:
        app = Dashboard(
            RecordingWriter(RecordingFeed("x", scenes.empty()), file), None, ThemeChoice()
        )
        async with app.run_test() as pilot:
            await pilot.app.workers.wait_for_complete()
    assert app.return_code == 1
    assert "error: the recording cannot be written: No space left" in capsys.readouterr().err


def test_a_real_tape_can_be_read_and_holds_a_restart() -> None:
    tape = read_recording(TAPE)
    assert sum(isinstance(one, FeedLost) for one in tape) >= 2
    assert any(isinstance(one, StatusFrame) and one.snapshot.waiting for one in tape)
    assert isinstance(ended(tape)[-1], FeedLost)


@pytest.mark.parametrize("content", [b"nonsense\n", b'{"frame": 3}\n', b"\xff\xfe\n", b"[1]\n"])
def test_what_is_no_tape_is_refused_with_its_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.tape"
    path.write_bytes(b'{"lost": "x"}\n' + content)
    with pytest.raises(BadRequest, match=r"bad\.tape is not a recording: line 2"):
        read_recording(path)


async def test_speed_divides_the_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    tape = (StatusFrame(at=10.0), FeedLost("x", 0.1), StatusFrame(at=12.0))
    assert [one async for one in RecordingFeed("x", tape, speed=40.0).news()] == list(tape)
    assert pauses == [2.0 / 40.0]


def test_frames_of_newer_services_are_read_and_garbage_is_told() -> None:
    newer = b'{"at": 5.0, "weather": "fine", "service": {"model": "m", "mood": "good"}}'
    frame = frame_in(newer)
    assert isinstance(frame, StatusFrame)
    assert frame.service.model == "m"
    for garbage in (b"", b"\xff", b'{"at": "noon"}', b'{"snapshot": {"slots": [{}]}}'):
        assert isinstance(frame_in(garbage), FeedLost)


def test_a_frame_survives_its_own_encoding() -> None:
    frame = scenes.busy()[-1]
    assert frame_in(msgspec.json.encode(frame)) == frame
