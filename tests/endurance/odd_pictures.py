"""Pictures that are bombs, floods or no pictures, built by hand where no encoder writes them."""

import io
import struct
import zlib
from collections.abc import Callable, Mapping
from random import Random

from PIL import Image

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
MIB = 1 << 20
GRAY = 0
RGB = 2
PALETTE = 3
RGBA = 6
"""Color types of PNG."""


def png_chunk(name: bytes, data: bytes) -> bytes:
    """A chunk with its length and checksum."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(
    size: tuple[int, int] = (32, 32),
    color: int = RGB,
    bits: int = 8,
    *,
    before: bytes = b"",
    after: bytes = b"",
    interlaced: bool = False,
    idat: bytes | None = None,
) -> bytes:
    """A black PNG with further chunks before and after its pixels."""
    width, height = size
    head = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, interlaced)
    if idat is None:
        n_channels = {GRAY: 1, RGB: 3, PALETTE: 1, RGBA: 4}[color]
        n_bytes = (1 + (width * bits * n_channels + 7) // 8) * height
        idat = zeros(n_bytes + (64 * height if interlaced else 0))
    pixels = png_chunk(b"IDAT", idat)
    return PNG_MAGIC + png_chunk(b"IHDR", head) + before + pixels + after + png_chunk(b"IEND", b"")


def zeros(n_bytes: int) -> bytes:
    """So many zeros, compressed a piece at a time."""
    packer = zlib.compressobj(9)
    packed = [packer.compress(bytes(min(MIB, n_bytes - start))) for start in range(0, n_bytes, MIB)]
    return b"".join((*packed, packer.flush()))


def encoded(image: Image.Image, kind: str, **more: object) -> bytes:
    """A picture by Pillow's encoder."""
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


def exif(
    entries: list[tuple[int, int, int, int]], following: int = 0, behind: bytes = b""
) -> bytes:
    """A directory of EXIF: tags, types, counts, values; offset of the next one; and other bytes."""
    listed = b"".join(struct.pack(">HHII", *entry) for entry in entries)
    head = b"MM\0*" + struct.pack(">IH", 8, len(entries))
    return head + listed + struct.pack(">I", following) + behind


NESTED = exif([(0x8769, 4, 1, 8), (0x8825, 4, 1, 8), (0xA005, 4, 1, 8), (0x0112, 3, 1, 6 << 16)], 8)
"""A directory that is its own child and its own successor."""
MUCH_EXIF = exif([(0x0112, 3, 1, 6 << 16), (0x9286, 7, 7 * MIB, 64)], behind=bytes(7 * MIB))
MANY_TAGS = exif([(0x0112, 3, 1, 6 << 16), *((tag, 5, 60_000, 8) for tag in range(700, 60_000))])
BEYOND = exif([(0x0112, 3, 0xFFFFFFFF, 0xFFFFFFFF)])
ZERO_RATIONAL = exif([(0x0112, 5, 1, 32)], behind=bytes(64))
TEXT_TURN = exif([(0x0112, 2, 4, 0x41414100)])
EXIFS = {
    "nested": NESTED,
    "of 7 MiB": MUCH_EXIF,
    "many tags": MANY_TAGS,
    "beyond": BEYOND,
    "zero rational": ZERO_RATIONAL,
    "turn as text": TEXT_TURN,
    "empty": b"",
    "half": NESTED[:11],
}


def _texts(name: bytes, n: int) -> bytes:
    data = {b"tEXt": b"k\0v", b"zTXt": b"k\0\0" + zlib.compress(b"v"), b"iTXt": b"k\0\0\0\0\0v"}[
        name
    ]
    return png_chunk(name, data) * n


def _profile(data: bytes) -> bytes:
    return png_chunk(b"iCCP", b"profile\0\0" + data)


def _frames_of_png(n: int, side: int) -> bytes:
    """Control and data chunks of so many frames of an APNG."""
    pixel = zlib.compress(bytes(4))
    frames = [png_chunk(b"acTL", struct.pack(">II", n, 0))]
    for number in range(n):
        control = struct.pack(">IIIIIHHBB", 2 * number, side, side, 0, 0, 1, 10, 0, 0)
        frames.append(png_chunk(b"fcTL", control))
        frames.append(png_chunk(b"fdAT", struct.pack(">I", 2 * number + 1) + pixel))
    return b"".join(frames)


def gif(
    screen: tuple[int, int], frame: tuple[int, int], n_frames: int = 1, before: bytes = b""
) -> bytes:
    """A GIF of one color, whose frames have few codes."""
    head = b"GIF89a" + struct.pack("<HHBBB", *screen, 0x80, 0, 0) + bytes(6)
    image = b"\x2c" + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x02\x02\x44\x01\x00"
    return head + before + image * n_frames + b";"


def segment(marker: int, data: bytes) -> bytes:
    """A segment of a JPEG, of 65,533 bytes at most."""
    return struct.pack(">BBH", 0xFF, marker, len(data) + 2) + data


def jpeg(extra: bytes = b"", mode: str = "RGB", **more: object) -> bytes:
    """A small JPEG with other segments behind its first marker."""
    whole = encoded(Image.new(mode, (32, 32)), "JPEG", **more)
    return whole[:2] + extra + whole[2:]


def scanned(side: int, n_scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    whole = encoded(Image.new("L", (side, side), 128), "JPEG", progressive=True)
    offset = whole.rindex(b"\xff\xda")
    return whole[:offset] + whole[offset:-2] * n_scans + whole[-2:]


def _sized_jpeg(width: int, height: int) -> bytes:
    """A JPEG whose frame header names another size."""
    whole = jpeg()
    offset = whole.index(b"\xff\xc0")
    return whole[: offset + 5] + struct.pack(">HH", height, width) + whole[offset + 9 :]


def webp(chunks: list[tuple[bytes, bytes]]) -> bytes:
    """A WebP of these chunks."""
    body = b"".join(
        name + struct.pack("<I", len(data)) + data + bytes(len(data) % 2) for name, data in chunks
    )
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def _canvas(width: int, height: int, flags: int) -> tuple[bytes, bytes]:
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"VP8X", bytes((flags, 0, 0, 0)) + sides


def _lossless() -> bytes:
    return encoded(Image.new("RGB", (32, 32)), "WEBP", lossless=True)


def _with_canvas(width: int, height: int, flags: int, extra: list[tuple[bytes, bytes]]) -> bytes:
    pixels = _lossless()[20:]
    return webp([_canvas(width, height, flags), *extra, (b"VP8L", pixels)])


def _animated_webp(n_frames: int) -> bytes:
    frames = [Image.new("RGB", (16, 16), (n % 256, n // 256, 9)) for n in range(n_frames)]
    return encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True)


def _noise(n_bytes: int) -> bytes:
    return Random(1).randbytes(n_bytes)


def _flat(mode: str, size: tuple[int, int], kind: str, **more: object) -> bytes:
    return encoded(Image.new(mode, size), kind, **more)


def _endless_gif() -> bytes:
    """A frame at the limit of pixels whose codes end early."""
    return gif((6000, 6000), (6000, 6000))


def _commented_gif() -> bytes:
    comments = (b"\x21\xfe" + b"\xff" + bytes(255) + b"\0") * 20_000
    return gif((8, 8), (8, 8), before=comments)


PICTURES: Mapping[str, Callable[[], bytes]] = {
    "png": png,
    **{
        f"png: exif {name}": lambda data=data: png(before=png_chunk(b"eXIf", data))
        for name, data in EXIFS.items()
    },
    "png: exif behind": lambda: png(after=png_chunk(b"eXIf", NESTED)),
    "png: exif a thousand times": lambda: png(before=png_chunk(b"eXIf", NESTED) * 1000),
    "png: raw profile": lambda: png(
        before=png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zeros(900_000))
    ),
    "png: profile of 7 MiB": lambda: png(before=_profile(zlib.compress(_noise(7 * MIB), 0))),
    "png: profile of 1 GiB": lambda: png(before=_profile(zeros(1 << 30))),
    "png: broken profile": lambda: png(before=_profile(b"no zlib")),
    "png: profile without data": lambda: png(before=png_chunk(b"iCCP", b"x")),
    "png: 200,000 tEXt": lambda: png(before=_texts(b"tEXt", 200_000)),
    "png: 100,000 zTXt": lambda: png(before=_texts(b"zTXt", 100_000)),
    "png: 100,000 iTXt behind": lambda: png(after=_texts(b"iTXt", 100_000)),
    "png: zTXt of 1 GiB": lambda: png(before=png_chunk(b"zTXt", b"k\0\0" + zeros(1 << 30))),
    "png: iTXt of 1 GiB": lambda: png(before=png_chunk(b"iTXt", b"k\0\1\0\0\0" + zeros(1 << 30))),
    "png: 1,000 zTXt of 1 MB": lambda: png(
        before=png_chunk(b"zTXt", b"k\0\0" + zeros(1_000_000)) * 1000
    ),
    "png: 500,000 empty chunks": lambda: png(before=png_chunk(b"abCd", b"") * 500_000),
    "png: a chunk of 4 GiB": lambda: png(before=b"\xff\xff\xff\xffabCdxxxx"),
    "png: 5,000 frames": lambda: png(before=_frames_of_png(5000, 1)),
    "png: a frame of 2^31": lambda: png(before=_frames_of_png(2, 1 << 31)),
    "png: 2^32 frames": lambda: png(before=png_chunk(b"acTL", b"\xff" * 8)),
    "png: pixels of 1 GiB": lambda: png(idat=zeros(1 << 30)),
    "png: 100,000 IDAT": lambda: png(
        idat=b"", before=b"".join(png_chunk(b"IDAT", b"") for _ in range(100_000))
    ),
    "png: 6324 x 6324, 16 bits, interlaced": lambda: png((6324, 6324), RGBA, 16, interlaced=True),
    "png: 6324 x 6324, 1 bit": lambda: png((6324, 6324), GRAY, 1),
    "png: 1 x 8000": lambda: png((1, 8000)),
    "png: 8000 x 1": lambda: png((8000, 1)),
    "png: 1 x 40000": lambda: png((1, 40_000)),
    "png: 40000 x 1": lambda: png((40_000, 1)),
    "png: 0 x 0": lambda: png((0, 0)),
    "png: 2^31 x 2^31": lambda: png((2**31 - 1, 2**31 - 1), idat=b""),
    "png: 16 bits of gray": lambda: png((32, 32), GRAY, 16),
    "png: 3 bits": lambda: png((32, 32), GRAY, 3),
    "png: palette missing": lambda: png((32, 32), PALETTE),
    "png: palette with transparency": lambda: png(
        (32, 32), PALETTE, before=png_chunk(b"PLTE", bytes(768)) + png_chunk(b"tRNS", bytes(256))
    ),
    "png: transparency of another type": lambda: png(
        (32, 32), GRAY, 16, before=png_chunk(b"tRNS", b"x")
    ),
    "png: without pixels": lambda: png(idat=b""),
    "png: half": lambda: png()[:60],
    "png: magic and noise": lambda: PNG_MAGIC + _noise(100_000),
    "png: magic": lambda: PNG_MAGIC,
    "gif: 20,000 frames": lambda: gif((4, 4), (4, 4), 20_000),
    "gif: a screen of 65535": lambda: gif((65_535, 65_535), (4, 4)),
    "gif: a frame beyond its screen": lambda: gif((4, 4), (65_535, 65_535)),
    "gif: a frame of 7999 beyond its screen": lambda: gif((4, 4), (7999, 7999)),
    "gif: few codes for many pixels": _endless_gif,
    "gif: comments": _commented_gif,
    "gif: no frame": lambda: gif((4, 4), (4, 4), 0),
    "gif: magic": lambda: b"GIF8",
    "jpeg": jpeg,
    **{
        f"jpeg: exif {name}": lambda data=data: jpeg(segment(0xE1, b"Exif\0\0" + data[:65_000]))
        for name, data in EXIFS.items()
    },
    "jpeg: 120 segments of exif": lambda: jpeg(
        segment(0xE1, b"Exif\0\0" + MUCH_EXIF[:65_000]) * 120
    ),
    "jpeg: 120 segments of profile": lambda: jpeg(
        b"".join(
            segment(0xE2, b"ICC_PROFILE\0" + bytes((n + 1, 120)) + _noise(65_000))
            for n in range(120)
        )
    ),
    "jpeg: profiles that count wrongly": lambda: jpeg(
        segment(0xE2, b"ICC_PROFILE\0" + bytes((255, 0))) * 300
    ),
    "jpeg: several pictures": lambda: jpeg(segment(0xE2, b"MPF\0" + NESTED)),
    "jpeg: no pictures in it": lambda: jpeg(segment(0xE2, b"MPF\0" + exif([]))),
    "jpeg: 2^32 pictures": lambda: jpeg(
        segment(0xE2, b"MPF\0" + exif([(0xB001, 4, 1, 0xFFFFFFFF), (0xB002, 7, 64, 0)]))
    ),
    "jpeg: resources of Photoshop": lambda: jpeg(
        segment(0xED, b"Photoshop 3.0\0" + b"8BIM\x03\xed\0\0\xff\xff\xff\xff" * 4000)
    ),
    "jpeg: comments": lambda: jpeg(segment(0xFE, bytes(65_000)) * 120),
    "jpeg: empty segments": lambda: jpeg(b"\xff\xe5\0\0" * 100_000),
    "jpeg: 100,000 comments": lambda: jpeg(segment(0xFE, b"") * 100_000),
    "jpeg: fill bytes": lambda: jpeg(b"\xff" * 4 * MIB),
    "jpeg: 5,000 scans": lambda: scanned(64, 5000),
    "jpeg: 99 scans of 6000": lambda: scanned(6000, 80),
    "jpeg: 6300 x 6300, progressive": lambda: _flat("L", (6300, 6300), "JPEG", progressive=True),
    "jpeg: 65500 x 65500": lambda: _sized_jpeg(65_500, 65_500),
    "jpeg: 7000 x 5000 of few codes": lambda: _sized_jpeg(7000, 5000),
    "jpeg: no height": lambda: _sized_jpeg(32, 0),
    "jpeg: CMYK": lambda: jpeg(mode="CMYK"),
    "jpeg: half": lambda: jpeg()[:300],
    "jpeg: magic": lambda: b"\xff\xd8\xff",
    "webp": _lossless,
    "webp: 1,000 frames": lambda: _animated_webp(1000),
    "webp: 7999 x 5000, lossless": lambda: _flat("RGB", (7999, 5000), "WEBP", lossless=True),
    "webp: a canvas of 2^24": lambda: _with_canvas(1 << 24, 1 << 24, 0, []),
    "webp: a canvas of another size": lambda: _with_canvas(4000, 4000, 0, []),
    "webp: exif of 7 MiB": lambda: _with_canvas(32, 32, 8, [(b"EXIF", MUCH_EXIF)]),
    "webp: nested exif": lambda: _with_canvas(32, 32, 8, [(b"EXIF", NESTED)]),
    "webp: profile of 7 MiB": lambda: _with_canvas(32, 32, 32, [(b"ICCP", _noise(7 * MIB))]),
    "webp: 200,000 chunks": lambda: webp([(b"XXXX", b"")] * 200_000),
    "webp: half": lambda: _lossless()[:24],
    "webp: noise": lambda: webp([(b"VP8 ", _noise(1000))]),
    "tiff": lambda: _flat("RGB", (32, 32), "TIFF"),
    "bmp": lambda: _flat("RGB", (32, 32), "BMP"),
    "ico": lambda: _flat("RGB", (32, 32), "ICO"),
    "avif": lambda: b"\0\0\0\x20ftypavif" + _noise(1000),
    "psd": lambda: b"8BPS\0\1" + bytes(100),
    "pdf": lambda: b"%PDF-1.7\n" + bytes(100),
    "svg": lambda: b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/x"/></svg>',
    "png: magic before tiff": lambda: PNG_MAGIC + _flat("RGB", (32, 32), "TIFF"),
    "no bytes": lambda: b"",
}
"""Pictures by what is odd about them."""
