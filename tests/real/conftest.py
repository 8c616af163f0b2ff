"""`pytest -m real` runs all of these tests; without it a slice of SmolLM2 runs."""

from pathlib import Path

import pytest

from tests.real.asking import COMPARED

FOLDER = Path(__file__).parent
MOST_S = 4 * 3600
"""Bound of one test on a busy machine; each of its requests has its own patience."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.timeout(MOST_S))
    if "real" not in config.option.markexpr:
        items[:] = [item for item in items if item.get_closest_marker("real") is None]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not COMPARED:
        return
    terminalreporter.section("compared with cold and alone")
    for folder, path in dict.fromkeys((folder, path) for folder, path, _ in COMPARED):
        same, other = (COMPARED[folder, path, kind] for kind in ("same", "other"))
        terminalreporter.write_line(f"{folder:22} {path:16} {same:4} same {other:4} other")
