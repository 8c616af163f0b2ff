"""The README's picture shows agents as a developer has them, and nothing of the hostile tape."""

import struct

from tests.pages.dashboard_picture import CLAUDE, CODEX, MODEL, OPENCODE, PICTURE, svg, tape
from tests.tui import scenes


async def test_the_picture_has_realistic_names() -> None:
    drawn = (await svg()).replace("&#160;", " ")
    for text in (MODEL, CODEX, OPENCODE, CLAUDE.partition(" ")[0]):
        assert text in drawn
    for text in ("rm -rf", "qwen2.5", "claude-main", "opencode-2"):
        assert text not in drawn


def test_no_frame_of_the_tape_has_a_hostile_name() -> None:
    frames = tape()
    assert len(frames) > 200
    assert all(scenes.EVIL not in repr(frame) for frame in frames)


def test_the_picture_is_wide_enough_to_read() -> None:
    header = PICTURE.read_bytes()[:24]
    width, height = struct.unpack(">II", header[16:24])
    assert header.startswith(b"\x89PNG") and width >= 1600 and height >= 700
