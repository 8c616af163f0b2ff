"""`pytest -m real` runs all of these tests; without it a slice of SmolLM2 runs."""

import pytest

from tests.real.asking import COMPARED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "real" not in config.option.markexpr:
        items[:] = [item for item in items if item.get_closest_marker("real") is None]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not COMPARED:
        return
    terminalreporter.section("compared with cold and alone")
    for folder, path in dict.fromkeys((folder, path) for folder, path, _ in COMPARED):
        same, other = (COMPARED[folder, path, kind] for kind in ("same", "other"))
        terminalreporter.write_line(f"{folder:22} {path:16} {same:4} same {other:4} other")
