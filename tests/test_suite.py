"""A failure in one of two runs is told as flaky; a trace in the user's home fails the run."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mlxstack.cli.commands.tui import WEB_PORT
from mlxstack.config import presets
from mlxstack.host.home import HOME_VARIABLE, Home
from tests import environment, user_home
from tests.ports import unused_port

ROOT = Path(__file__).parents[1]
TESTS = """
from pathlib import Path

def test_passes():
    pass

def test_fails_the_first_time():
    mark = Path(__file__).with_name("ran")
    ran = mark.exists()
    mark.touch()
    assert ran
"""
BROKEN = """
def test_fails_always():
    assert False
"""
MANY = """
import pytest

@pytest.mark.parametrize("n", range(6))
def test_fails(n):
    assert False
"""


LEAVES = """
from tests import environment

environment.isolate()
"""
TRACES = (
    ("(HOME / 'presets/demo.yaml').read_text()", "presets/demo.yaml was read"),
    ("(HOME / 'presets/new.yaml').touch()", "presets/new.yaml was added"),
    ("(HOME / 'keys.txt').write_text('')", "keys.txt was changed"),
    ("(HOME / 'run/served.json').unlink()", "run/served.json was removed"),
    ("Path('~/.new').expanduser().mkdir()", ".new was added"),
    ("os.kill(int((HOME / 'run/served.pid').read_text()), 15)", "user's service was stopped"),
    ("create_connection(ADDRESS).sendall(b'GET /health\\r\\n')", "was called: GET /health"),
    ("create_connection(ADDRESS).close()", "was called: nothing was sent"),
    ("urlopen('http://example.com/model')", "was called: GET http://example.com/model"),
)
"""Lines of a test, and what the suite says of what they did."""


def suite(folder: Path, *options: str, port: int | None = None) -> tuple[int, str, str]:
    """Run the tests of a folder as `make suite` does: exit code, output, flaky tests."""
    code = (
        "import sys; from pathlib import Path; from tests import suite;"
        "sys.exit(suite.run(sys.argv[3:], Path(sys.argv[1]), [int(sys.argv[2])]))"
    )
    (folder / "pytest.ini").write_text("[pytest]\n")
    flaky = folder / "flaky"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(flaky), str(port or unused_port()), *options],
        cwd=folder,
        # Most of a start is the import of plugins.
        env=os.environ
        | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        | {"PYTEST_PLUGINS": "xdist.plugin"},
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout, flaky.read_text() if flaky.exists() else ""


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["alone", "workers"])
def test_a_test_that_passes_alone_is_flaky(tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    code, output, flaky = suite(tmp_path, *options)
    assert code == 0, output
    assert "test_fails_the_first_time failed, and passed alone" in flaky
    assert flaky.count("\n") == 1


def test_a_test_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS + BROKEN)
    code, output, flaky = suite(tmp_path)
    assert code == 1, output
    assert "test_fails_always" not in flaky


def test_many_failures_are_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(MANY)
    code, output, flaky = suite(tmp_path)
    assert code == 1
    assert "again, alone" not in output
    assert not flaky


def touching(line: str, port: int) -> str:
    """A file with a test that does `line` in the environment that it inherits."""
    return f"""
import os
from contextlib import suppress
from pathlib import Path
from socket import create_connection
from urllib.request import urlopen

HOME = Path(os.environ["MLX_STACK_HOME"])
ADDRESS = ("127.0.0.1", {port})

def test_touches():
    with suppress(OSError):
        {line}
"""


def sees_reads(folder: Path) -> bool:
    """Whether this system notes when a file is read."""
    file = folder / "file"
    file.write_text("x")
    os.utime(file, (0, file.stat().st_mtime))
    file.read_text()
    return sys.platform == "linux" and file.stat().st_atime > 0


def test_tests_that_touch_what_is_the_users_fail_the_run(tmp_path: Path) -> None:
    port = unused_port()
    lines = [*TRACES] if sees_reads(tmp_path) else [*TRACES[1:]]
    for number, (line, _) in enumerate(lines):
        (tmp_path / f"test_{number}.py").write_text(touching(line, port))
    code, output, flaky = suite(tmp_path, "-n", "2", port=port)
    assert code == 1, output
    assert f"{len(lines)} passed" in output and not flaky, output
    assert not [trace for _, trace in lines if trace not in output], output


def test_tests_that_leave_the_users_environment_do_not(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(LEAVES)
    (tmp_path / "test_some.py").write_text(
        "import os\nfrom pathlib import Path\n\n"
        "def test_has_a_home_of_its_own():\n"
        "    assert not [*Path.home().iterdir()]\n"
        "    (Path.home() / 'new').touch()\n"
        "    assert not [name for name in os.environ if 'PROXY' in name.upper()]\n"
    )
    code, output, _ = suite(tmp_path, "-n", "2")
    assert code == 0, output
    assert "what is not their own" not in output


def test_a_test_process_has_a_home_of_its_own() -> None:
    assert HOME_VARIABLE not in os.environ
    assert Path.home().parent == Path(os.environ[environment.HOMES])
    assert not environment.default_home().exists()


def test_a_port_of_another_program_is_told(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("def test_passes():\n    pass\n")
    with socket.create_server(("127.0.0.1", unused_port())) as program:
        port = program.getsockname()[1]
        code, output, _ = suite(tmp_path, port=port)
    assert code == 0, output
    assert f"port {port} is taken by another program" in output


def test_the_ports_of_the_suite_are_those_that_presets_have(tmp_path: Path) -> None:
    home = Home(tmp_path)
    ports = {presets.load(name, home, []).preset.server.port for name in presets.listed(home)}
    assert ports | {WEB_PORT} == set(user_home.PORTS)


def test_variables_that_steer_the_tests_stay() -> None:
    user = user_home.variables(Path("/home/user"), "http://127.0.0.1:1")
    steering = {"PATH": "/bin", "MLX_STACK_CAPTURES": "/captures", "MLX_STACK_TEST_DEVICE": "gpu"}
    names = {"PATH": "/bin", "TESTS_CAPTURES": "/captures", "TESTS_TEST_DEVICE": "gpu"}
    variables = environment.own(user | steering, "/own")
    assert variables == names | environment.FIXED | {"HOME": "/own"}
    assert environment.own(variables, "/own") == variables
