"""Bounds of images: what is refused before decoding, and how the rest is decoded."""

import base64
import io
import struct
import zlib

import pytest
from PIL import Image

from mlxstack.core.errors import BadRequest
from mlxstack.text.images import bounds, reader
from mlxstack.text.images.bounds import RefusedImage, decoded, upright_size


def encoded(image: Image.Image, kind: str = "PNG", **more: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG that names a size, with no more data than a header."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (bomb(50_000, 50_000), "pixels"),
        (bomb(8_001, 10), "8001 x 10 pixels"),
        (bomb(7_000, 7_000), "7000 x 7000 pixels"),
        (bytes(20_000_000), "20000000 bytes"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "send PNG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "send PNG"),
        (b"", "send PNG"),
        (encoded(Image.effect_noise((64, 64), 90))[:-600], "broken"),
    ],
)
def test_what_is_out_of_bounds_is_refused_with_its_measure(data: bytes, says: str) -> None:
    for _ in range(2):
        with pytest.raises(RefusedImage, match=says):
            upright_size(data)


def test_a_bomb_is_refused_by_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's decoder is never asked for the pixels of a large image."""
    monkeypatch.setattr(Image.Image, "load", None)
    with pytest.raises(RefusedImage, match="pixels"):
        decoded(bomb(7_900, 7_900))


def test_an_image_is_decoded_once_to_see_that_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("RGB", (17, 9), "teal"))
    assert upright_size(data) == (17, 9)
    monkeypatch.setattr(bounds, "PROCESSES", None)
    assert upright_size(data) == (17, 9)


def scanned(side: int, n_scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    whole = encoded(Image.new("L", (side, side), 128), "JPEG", progressive=True)
    at = whole.rindex(b"\xff\xda")
    n_own = whole.count(b"\xff\xda")
    return whole[:at] + whole[at:-2] * (n_scans - n_own + 1) + whole[-2:]


@pytest.mark.parametrize(("side", "n_scans"), [(64, 101), (64, 20_000), (6000, 30)])
def test_a_jpeg_of_many_scans_is_refused_by_its_markers(
    monkeypatch: pytest.MonkeyPatch, side: int, n_scans: int
) -> None:
    data = scanned(side, n_scans)
    monkeypatch.setattr(Image.Image, "load", None)
    with pytest.raises(RefusedImage, match="scans"):
        decoded(data)


def test_a_jpeg_of_usual_scans_is_taken() -> None:
    assert upright_size(scanned(64, 100)) == (64, 64)
    photo = encoded(Image.effect_noise((600, 400), 90).convert("RGB"), "JPEG", progressive=True)
    assert upright_size(photo) == (600, 400)


def test_an_image_that_takes_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "LIMIT_S", 0.05)
    data = encoded(Image.new("RGB", (5000, 5000), "navy"), "JPEG", progressive=True)
    for _ in range(2):
        with pytest.raises(RefusedImage, match=r"takes longer than 0\.05 s of CPU time"):
            upright_size(data)


def test_pixels_of_a_request_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_PIXELS_IN_ALL", 1000)
    parts = [
        {"data": base64.b64encode(encoded(Image.new("1", (30, 10), at))).decode()} for at in (0, 1)
    ]
    images = reader.ImageReader(accepts_images=True)
    images.new(parts[0], "first")
    images.earlier(parts[1])
    images.new(parts[0], "third")
    with pytest.raises(BadRequest, match="1200 pixels or more, at most 1000"):
        images.earlier(parts[1])


def test_the_orientation_of_exif_turns_size_and_pixels() -> None:
    image = Image.new("RGB", (40, 20), "red")
    image.paste("blue", (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind in ("JPEG", "PNG", "WEBP"):
        data = encoded(image, kind, exif=exif)
        assert upright_size(data) == (20, 40)
        assert decoded(data).size == (20, 40)
        red, _, blue = decoded(data).getpixel((10, 2))
        assert blue > 200
        assert red < 50


def test_an_animated_gif_is_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), one) for one in ("red", "blue")]
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    assert decoded(out.getvalue()).getpixel((4, 4)) == (255, 0, 0)


def test_transparency_is_over_white() -> None:
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    assert decoded(encoded(palette, transparency=0)).getpixel((1, 1)) == (255, 255, 255)
    assert decoded(encoded(Image.new("LA", (4, 4), (0, 0)))).getpixel((1, 1)) == (255, 255, 255)


def test_sixteen_bits_keep_their_levels() -> None:
    image = Image.new("I;16", (4, 4), 32_768)
    assert decoded(encoded(image)).getpixel((1, 1)) == (128, 128, 128)


def test_cmyk_becomes_rgb() -> None:
    data = encoded(Image.new("CMYK", (16, 16), (0, 0, 0, 0)), "JPEG")
    assert min(decoded(data).getpixel((3, 3))) > 245
