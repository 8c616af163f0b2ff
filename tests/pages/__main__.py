"""`python -m tests.pages` writes those pages of the docs that are drawn from the code."""

from pathlib import Path

from tests.pages import (
    api_page,
    benchmark_charts,
    capacity_page,
    command_page,
    model_page,
    preset_page,
)

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "presets.md": preset_page.page,
    "cli.md": command_page.page,
    "api.md": api_page.page,
    "capacity.md": capacity_page.page,
    "models.md": model_page.page,
}


def main() -> None:
    """Write all of them."""
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
    for name, drawn in benchmark_charts.pictures().items():
        (benchmark_charts.IMAGES / name).write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
