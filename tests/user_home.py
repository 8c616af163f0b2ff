"""A user beside whom the suite runs: what they have, and every trace that a test leaves there.

Their home has a running service, presets, keys and configurations, of which those that a program
reads are broken; their variables name them. The default ports are taken.
"""

import os
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.host.home import Home, make_home
from mlxstack.host.process import identify
from mlxstack.host.services import Phase, ServiceSpec, ServiceState, claim

HOST = "127.0.0.1"
PORTS = (7109, 7110)
"""Ports of the presets and of the dashboard in a browser, where a user names none."""
REQUEST_LINE_S = 5.0
"""How long a caller may take to send the line that names its request."""
POLL_S = 0.1
"""How soon a listener sees that it is to end."""

FILES = {
    ".cache/huggingface/hub": "not a folder",
    ".cache/huggingface/token": "hf_of_the_user",
    ".claude/settings.json": "{ broken",
    ".codex/config.toml": "[ broken",
    ".config/opencode/opencode.json": "{ broken",
    ".lmstudio/models/org/tiny/config.json": "{ broken",
    ".mlx-stack/presets/demo.yaml": "model: [broken",
    ".mlx-stack/presets/served.yaml": "model: {id: ~/models/served}\n",
    ".mlx-stack/keys.txt": "key-of-the-user\n",
    "models/served/config.json": "{ broken",
}
"""Files of the user, by their paths in the home; a preset of theirs goes before ours."""


class FileState(Struct, frozen=True):
    """Mode, size in bytes and times in ns of a file; of a folder the mode alone."""

    mode: int
    size: int = 0
    modified_ns: int = 0
    read_ns: int = 0


def states(home: Path) -> dict[str, FileState]:
    """State of everything in a home, by its path there."""
    state_of = {}
    for path in home.rglob("*"):
        with suppress(FileNotFoundError):
            stat = path.lstat()
            # Programs that index or protect a Mac read files, too.
            read_ns = stat.st_atime_ns if sys.platform == "linux" else 0
            state = FileState(stat.st_mode, stat.st_size, stat.st_mtime_ns, read_ns)
            state_of[str(path.relative_to(home))] = (
                FileState(stat.st_mode) if path.is_dir() else state
            )
    return state_of


def changes(before: Mapping[str, FileState], after: Mapping[str, FileState]) -> list[str]:
    """A phrase for each file that was added, removed, changed or read, such as `x was read`."""
    return [
        *(f"{path} was added" for path in sorted(after.keys() - before.keys())),
        *(f"{path} was removed" for path in sorted(before.keys() - after.keys())),
        *(
            f"{path} was {_verb(before[path], after[path])}"
            for path in sorted(before.keys() & after.keys())
            if before[path] != after[path]
        ),
    ]


def _verb(before: FileState, after: FileState) -> str:
    return "read" if replace(before, read_ns=after.read_ns) == after else "changed"


class _Listener(socketserver.ThreadingTCPServer):
    """Notes the first line of each connection, and answers none."""

    allow_reuse_address = True

    def __init__(self, port: int, calls: list[str]) -> None:
        self.calls = calls
        super().__init__((HOST, port), _Call)

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Call(socketserver.StreamRequestHandler):
    timeout = REQUEST_LINE_S
    server: _Listener

    def handle(self) -> None:
        line = b""
        with suppress(OSError):
            line = self.rfile.readline(200)
        text = line.decode("ascii", "replace").strip() or "nothing was sent"
        self.server.calls.append(f"port {self.server.port} was called: {text}")


class User:
    """A user whose home is `home`; `traces` tells what was done to what is theirs."""

    def __init__(self, home: Path, service: "subprocess.Popen[bytes]", calls: list[str]) -> None:
        self.variables: dict[str, str] = {}
        self.taken: list[int] = []
        """Ports that another program has, such as a service of the one who runs the tests."""
        self.traces: list[str] = []
        self._home = home
        self._service = service
        self._calls = calls
        self._is_stopped = False
        self._states: dict[str, FileState] = {}

    def watch(self, url: str) -> None:
        """Begin to watch; their variables name `url` as proxy and in place of each service."""
        self.variables = variables(self._home, url)
        for path in self._home.rglob("*"):
            modified_ns = path.stat().st_mtime_ns
            # Linux notes when a file is read if it was changed later than it was read last.
            os.utime(path, ns=(modified_ns - 10**9, modified_ns))
        self._states = states(self._home)

    def look(self, moment: str) -> None:
        """Note what was done since the last look; `moment` is now, such as `the end of x`."""
        before = self._states
        self._states = states(self._home)
        changed = changes(before, self._states)
        while self._calls:
            changed.append(self._calls.pop())
        if not self._is_stopped and self._service.poll() is not None:
            self._is_stopped = True
            changed.append("the user's service was stopped")
        self.traces += [f"{trace}, before {moment}" for trace in changed]


def variables(home: Path, url: str) -> dict[str, str]:
    """Variables of the user's shell, which must not change a test."""
    services = ("ANTHROPIC_BASE_URL", "HF_ENDPOINT", "OPENAI_API_BASE", "OPENAI_BASE_URL")
    proxies = ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "all_proxy", "http_proxy", "https_proxy")
    return {
        **dict.fromkeys((*services, *proxies), url),
        "ANTHROPIC_API_KEY": "key-of-the-user",
        "ANTHROPIC_MODEL": "model-of-the-user",
        "CODEX_HOME": str(home / ".codex"),
        "COLUMNS": "40",
        "HF_HOME": str(home / ".cache" / "huggingface"),
        "HF_TOKEN": "hf_of_the_user",
        "HOME": str(home),
        "LANG": "tr_TR.UTF-8",
        "MLX_STACK_API_KEY": "key-of-the-user",
        "MLX_STACK_HOME": str(home / ".mlx-stack"),
        "MLX_STACK_MEMORY": "no size",
        "MLX_STACK_SERVER_PORT": "no port",
        "MLX_STACK_WORKER": "false",
        "NO_COLOR": "1",
        "OPENAI_API_KEY": "key-of-the-user",
        "TERM": "dumb",
        "TZ": "Asia/Kathmandu",
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_CONFIG_HOME": str(home / ".config"),
    }


@contextmanager
def beside(home: Path, ports: Sequence[int] = PORTS) -> Iterator[User]:
    """Have a user in the empty folder `home`, with something that listens on each of `ports`."""
    for name, text in FILES.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    calls: list[str] = []
    # Its input ends with this process, and it ends with its input.
    sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(sleeper, stdin=subprocess.PIPE, start_new_session=True) as service:
        _claim(home, service.pid, ports[0])
        user = User(home, service, calls)
        with ExitStack() as listeners:
            for port in ports:
                try:
                    _start_listener(listeners, port, calls)
                except OSError:
                    user.taken.append(port)
            user.watch(f"http://{HOST}:{_start_listener(listeners, 0, calls)}")
            yield user
        # The listeners have ended, and with them every connection.
        user.look("the end")


def _claim(home: Path, pid: int, port: int) -> None:
    """Write the state of the user's service, as its supervisor would."""
    root = Home(home / ".mlx-stack")
    supervisor = identify(pid)
    assert supervisor is not None
    make_home(root)
    url = f"http://{HOST}:{port}"
    spec = ServiceSpec("served", str(root.root), "served", url, worker=())
    claim(ServiceState(spec, Phase.RUNNING, supervisor))


def _start_listener(stack: ExitStack, port: int, calls: list[str]) -> int:
    """Listen until the stack is left; the port. Raises OSError where it is taken."""
    server = stack.enter_context(_Listener(port, calls))
    thread = threading.Thread(target=server.serve_forever, args=[POLL_S], daemon=True)
    thread.start()
    stack.callback(thread.join)
    stack.callback(server.shutdown)
    return server.port
