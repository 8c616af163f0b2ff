"""`pytest -m real` runs all of these tests; without it a slice of SmolLM2 runs."""

import collections
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.real.asking import COMPARED

FOLDER = Path(__file__).parent
MAX_S = 4 * 3600
"""Bound of one test on a busy machine; each of its requests has its own patience."""
PROPERTY = "compared"
TOTAL: collections.Counter[tuple[str, str, str]] = collections.Counter()
"""`COMPARED` of all workers, which bring theirs in the reports of their tests."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.timeout(MAX_S))
    if "real" not in config.option.markexpr:
        items[:] = [item for item in items if item.get_closest_marker("real") is None]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.user_properties.append((PROPERTY, [[*key, n] for key, n in COMPARED.items()]))
    COMPARED.clear()
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, counts in report.user_properties:
        if name == PROPERTY:
            TOTAL.update({(folder, path, kind): n for folder, path, kind, n in counts})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not TOTAL:
        return
    terminalreporter.section("compared with cold and alone")
    for folder, path in dict.fromkeys((folder, path) for folder, path, _ in TOTAL):
        same, different = (TOTAL[folder, path, kind] for kind in ("same", "other"))
        terminalreporter.write_line(f"{folder:22} {path:16} {same:4} same {different:4} other")
