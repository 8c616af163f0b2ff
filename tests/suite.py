"""The whole suite; a test that fails is run once more, alone.

`python -m tests.suite ARGUMENTS` passes the arguments to pytest. A test that passes alone is
flaky: it is named in `FLAKY`, whose text `make test` prints last, and the run counts as passed.

It runs beside a user (`user_home`): a run whose tests touch what is theirs fails.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests import user_home
from tests.user_home import User

MAX_RERUNS = 5
"""More failures than this are a fault of the code, not of a busy machine."""
FLAKY = Path(sys.prefix, "flaky")


class Reports:
    """A pytest plugin: ids of failed tests, those of all workers, and looks at the user's home."""

    def __init__(self, user: User) -> None:
        self.failed: list[str] = []
        self._user = user

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)
        if report.when == "teardown":
            self._user.look(f"the end of {report.nodeid}")


def run(
    arguments: Sequence[str], flaky: Path = FLAKY, ports: Sequence[int] = user_home.PORTS
) -> int:
    """Run pytest, then each failed test alone; return an exit code of pytest.

    `ports` are taken meanwhile; no test may connect to them.
    """
    flaky.unlink(missing_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="user-") as home,
        user_home.beside(Path(home), ports) as user,
    ):
        for port in user.taken:
            _say(f"port {port} is taken by another program; calls of it are not seen")
        os.environ.update(user.variables)
        code = _run(arguments, flaky, user)
    if not user.traces:
        return code
    _say("tests touched what is not their own (other tests may have run at the same time):")
    for trace in user.traces:
        _say(f"  {trace}")
    return code or int(pytest.ExitCode.TESTS_FAILED)


def _run(arguments: Sequence[str], flaky: Path, user: User) -> int:
    reports = Reports(user)
    env = dict(os.environ)
    code = pytest.main(list(arguments), plugins=[reports])
    if code != pytest.ExitCode.TESTS_FAILED or not 0 < len(reports.failed) <= MAX_RERUNS:
        return int(code)
    passed = [test for test in reports.failed if _passes_alone(test, env)]
    flaky.write_text("".join(f"flaky: {test} failed, and passed alone\n" for test in passed))
    return int(pytest.ExitCode.OK if passed == reports.failed else code)


def _passes_alone(test: str, env: Mapping[str, str]) -> bool:
    """Whether it passes in a process with this environment."""
    _say(f"\nagain, alone: {test}")
    command = [sys.executable, "-m", "pytest", "-q", test]
    return subprocess.run(command, env=env, check=False).returncode == 0


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
