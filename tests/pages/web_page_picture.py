"""The picture of the web page: two turns with the demo model in a real Chromium.

`make shots` runs this.
"""

import tempfile
from pathlib import Path

from mlxstack.core.preset import ModelSpec, SlotSpec
from mlxstack.demo import MODEL_DIR
from tests.api.running import running, tiny_preset
from tests.api.test_web_page import FIGURES, send, wait_for
from tests.tui.browser import chromium

PICTURE = Path(__file__).parents[2] / "docs" / "img" / "web-page.png"
TURNS = ("Hello!", "Name three colors.")


def main() -> None:
    """Chat twice and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        preset = tiny_preset(
            MODEL_DIR,
            model=ModelSpec(id=str(MODEL_DIR), alias="demo"),
            slots=SlotSpec(count=3, n_ctx=4096),
        )
        with (
            running(preset, Path(folder, "home")) as live,
            chromium(Path(folder, "profile"), 1180, 760) as browser,
        ):
            browser.open(live.url)
            wait_for(browser, "document.getElementById('model')?.value")
            for n, text in enumerate(TURNS):
                send(browser, text)
                wait_for(browser, f"{FIGURES}[{n}]?.textContent")
                wait_for(browser, "document.getElementById('stop').hidden")
            PICTURE.write_bytes(browser.screenshot())


if __name__ == "__main__":
    main()
