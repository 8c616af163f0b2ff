"""The whole suite; a test that fails is run once more, alone.

`python -m tests.suite ARGUMENTS` passes the arguments to pytest. A test that passes alone is
flaky: it is named in `FLAKY`, whose text `make test` prints last, and the run counts as passed.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

MOST_RERUNS = 5
"""More failures than this are a fault of the code, not of a busy machine."""
FLAKY = Path(sys.prefix, "flaky")


class Failures:
    """A pytest plugin that collects the ids of failed tests, those of all workers."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.ids:
            self.ids.append(report.nodeid)


def run(arguments: Sequence[str], flaky: Path = FLAKY) -> int:
    """Run pytest, then each failed test alone; return an exit code of pytest."""
    flaky.unlink(missing_ok=True)
    failures = Failures()
    code = pytest.main(list(arguments), plugins=[failures])
    if code != pytest.ExitCode.TESTS_FAILED or not 0 < len(failures.ids) <= MOST_RERUNS:
        return int(code)
    passed = [test for test in failures.ids if _passes_alone(test)]
    flaky.write_text("".join(f"flaky: {test} failed, and passed alone\n" for test in passed))
    return int(pytest.ExitCode.OK if passed == failures.ids else code)


def _passes_alone(test: str) -> bool:
    sys.stdout.write(f"\nagain, alone: {test}\n")
    sys.stdout.flush()
    command = [sys.executable, "-m", "pytest", "-q", test]
    return subprocess.run(command, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
