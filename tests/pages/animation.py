"""The animation of the README: the recording of a second agent, as a GIF.

`make shots` runs this after the recording; pyte, cairosvg and Pillow are installed for it.
"""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tests.pages.dashboard_picture import FONT
from tests.pages.recording import CAST

ANIMATION = CAST.with_suffix(".gif")
WIDTH = 1000
MIN_S = 0.4
MAX_S = 2.5
"""Seconds that a frame is shown."""


def frames(cast: Path) -> Iterator[tuple[Text, float]]:
    """Screens of the recording with the seconds until the next one."""
    import pyte

    first, *lines = cast.read_text(encoding="utf-8").splitlines()
    header = json.loads(first)
    events = [json.loads(line) for line in lines]
    screen = pyte.Screen(header["width"], header["height"])
    stream = pyte.Stream(screen)
    since = events[0][0]
    ends = [at_s for at_s, _, _ in events[1:]] + [events[-1][0] + MAX_S]
    for (_, _, text), end in zip(events, ends, strict=True):
        # pyte prints the end of a query for the state of a mode, which it does not know.
        stream.feed(re.sub(r"\x1b\[[?>][\d;]*(?:\$p|u)", "", text))
        if end - since >= MIN_S:
            yield drawn(screen), min(end - since, MAX_S)
            since = end


def drawn(screen: Any) -> Text:
    """Text of the screen in its colors."""
    lines = []
    for row in range(screen.lines):
        line = Text(end="")
        for column in range(screen.columns):
            cell = screen.buffer[row][column]
            colors = [color(cell.fg, "#c5c8c6"), color(cell.bg, "#121212")]
            foreground, background = reversed(colors) if cell.reverse else colors
            bold = "bold " if cell.bold else ""
            line.append(cell.data, f"{bold}{foreground} on {background}")
        lines.append(line)
    return Text("\n").join(lines)


def color(name: str, default: str) -> str:
    """Color of pyte, a name or six hexadecimal digits, for rich."""
    if name == "default":
        return default
    return f"#{name}" if re.fullmatch(r"[0-9a-f]{6}", name) else name.replace("brown", "yellow")


def picture(text: Text, size: tuple[int, int]) -> Any:
    """One frame as an image of Pillow."""
    import cairosvg
    from PIL import Image

    console = Console(
        width=size[0],
        height=size[1],
        record=True,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(text, overflow="crop", no_wrap=True)
    svg = re.sub(r"font-family:\s*[^;]+;", f"font-family: {FONT};", console.export_svg(title=""))
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    png = cairosvg.svg2png(bytestring=svg.encode(), output_width=WIDTH)
    return Image.open(io.BytesIO(png)).convert("RGB").quantize(64)


def main() -> None:
    """Write the animation."""
    header = json.loads(CAST.read_text(encoding="utf-8").partition("\n")[0])
    pictures = list(frames(CAST))
    images = [picture(text, (header["width"], header["height"])) for text, _ in pictures]
    images[0].save(
        ANIMATION,
        save_all=True,
        append_images=images[1:],
        duration=[round(seconds * 1000) for _, seconds in pictures],
        loop=0,
        optimize=True,
    )


if __name__ == "__main__":
    main()
