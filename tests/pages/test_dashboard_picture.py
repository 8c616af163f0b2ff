"""The README's picture shows agents as a developer has them, and nothing hostile."""

import struct

from tests.pages.dashboard_picture import PICTURE, svg
from tests.tui import scenes, shots


async def test_the_picture_has_realistic_names() -> None:
    drawn = (await svg()).replace("&#160;", " ")
    titles = [shots.TITLES[slot.agent] for slot in shots.SLOTS if slot.agent]
    assert len(titles) >= 3
    for text in (shots.MODEL, *(title.partition(" · ")[2] for title in titles)):
        assert text in drawn
    assert "rm -rf" not in drawn


def test_no_frame_of_the_recording_has_a_hostile_name() -> None:
    frames = shots.working()
    assert len(frames) > 200
    assert all(scenes.EVIL not in repr(frame) for frame in frames)


def test_the_picture_is_wide_enough_to_read() -> None:
    header = PICTURE.read_bytes()[:24]
    width, height = struct.unpack(">II", header[16:24])
    assert header.startswith(b"\x89PNG") and width >= 1600 and height >= 700
