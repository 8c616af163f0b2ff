"""The README's picture and the recording show agents as a developer has them."""

import json
import re
import struct

from tests.pages.animation import ANIMATION
from tests.pages.dashboard_picture import PICTURE, svg
from tests.pages.recording import CAST, COLUMNS, LINES
from tests.tui import scenes, shots


async def test_the_picture_has_realistic_names() -> None:
    drawn = (await svg()).replace("&#160;", " ")
    for text in (shots.MODEL, "claude · shop-api", "codex · infra", "opencode · website"):
        assert text in drawn
    for text in ("rm -rf", "qwen2.5", "claude-main", "opencode-2"):
        assert text not in drawn


def test_no_frame_of_the_picture_has_a_hostile_name() -> None:
    frames = shots.working()
    assert len(frames) > 200
    assert all(scenes.EVIL not in repr(frame) for frame in frames)


def test_the_picture_is_wide_enough_to_read() -> None:
    header = PICTURE.read_bytes()[:24]
    width, height = struct.unpack(">II", header[16:24])
    assert header.startswith(b"\x89PNG") and width >= 1600 and height >= 700


def test_the_recording_plays_and_shows_a_second_agent_that_reuses_its_prompt() -> None:
    first, *lines = CAST.read_text(encoding="utf-8").splitlines()
    header = json.loads(first)
    events = [json.loads(line) for line in lines]
    assert (header["version"], header["width"], header["height"]) == (2, COLUMNS, LINES)
    assert CAST.stat().st_size < 300_000
    ats = [at_s for at_s, _, _ in events]
    assert ats == sorted(ats)
    assert {kind for _, kind, _ in events} == {"o"}
    # Cursor moves lie between the cells that changed.
    screen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", "".join(text for _, _, text in events))
    before, _, after = screen.partition("claude · shop-web")
    assert "claude · shop-api" in before
    assert re.search(r"9[5-9]%", after)


def test_the_animation_is_that_of_the_recording() -> None:
    """As wide as the README shows it, and as many frames as the recording has pauses."""
    content = ANIMATION.read_bytes()
    width, height = struct.unpack("<HH", content[6:10])
    assert content.startswith(b"GIF89a") and width >= 1000 and height >= 500
    ats = [json.loads(line)[0] for line in CAST.read_text(encoding="utf-8").splitlines()[1:]]
    n_frames = content.count(b"\x21\xf9\x04")
    assert len(ats) / 2 < n_frames <= len(ats)
    assert len(content) < 1_000_000
