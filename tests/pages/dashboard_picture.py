"""The picture of the README: the dashboard with five coding agents at work.

`make shots` runs this; it needs cairosvg, which is installed for it, and a font with box drawing.
"""

import asyncio
import re
import sys
from pathlib import Path

from mlxstack.tui.app import Dashboard
from mlxstack.tui.recording import RecordingFeed
from mlxstack.tui.theme import ThemeChoice
from tests.pages import recording
from tests.tui import shots

PICTURE = Path(__file__).parents[2] / "docs" / "img" / "dashboard.png"
SIZE = (120, 28)
FONT = "DejaVu Sans Mono"


async def svg() -> str:
    """The first screen after the tape."""
    app = Dashboard(RecordingFeed("127.0.0.1:7109", shots.working()), None, ThemeChoice())
    async with app.run_test(size=SIZE) as pilot:
        await pilot.app.workers.wait_for_complete()
        await pilot.pause()
        await pilot.pause()
        return app.export_screenshot(title="mlx-stack tui")


def main() -> int:
    """Write the picture and the recording."""
    import cairosvg

    drawn = re.sub(r"font-family:\s*[^;]+;", f"font-family: {FONT};", asyncio.run(svg()))
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    cairosvg.svg2png(bytestring=drawn.encode(), write_to=str(PICTURE), output_width=1800)
    return recording.main()


if __name__ == "__main__":
    sys.exit(main())
