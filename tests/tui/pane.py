"""A terminal of 80x24 in tmux: keys go in, the screen comes out as text."""

import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.patience import wait_until


class Pane:
    """Runs one command in a tmux server of its own, under `folder`."""

    def __init__(self, folder: Path, command: Sequence[str], env: dict[str, str]) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        self._env = env
        size = ["-x", "80", "-y", "24"]
        self._do("new-session", "-d", *size, "-s", "it", "-c", str(folder), shlex.join(command))

    def press(self, *keys: str) -> None:
        """Keys by tmux's names."""
        self._do("send-keys", "-t", "it", *keys)

    def write(self, text: str) -> None:
        """Text as it is."""
        self._do("send-keys", "-t", "it", "-l", text)

    def text(self) -> str:
        """What a person sees now; empty when the command has ended."""
        return self._do("capture-pane", "-p", "-t", "it", is_checked=False)

    def until(self, is_so: Callable[[str], bool], what: str) -> str:
        """The screen once it is so."""
        seen = ""

        def look() -> bool:
            nonlocal seen
            seen = self.text()
            return is_so(seen)

        wait_until(look, lambda: f"never seen: {what}; last was:\n{seen}")
        return seen

    def shows(self, text: str) -> str:
        """The screen once these words are on it."""
        return self.until(lambda seen: text in seen, text)

    def ended(self) -> None:
        """Wait until the command has ended, and its session with it."""
        wait_until(
            lambda: not self._do("list-sessions", is_checked=False),
            lambda: f"still running:\n{self.text()}",
        )

    def close(self) -> None:
        """End the server of this pane, whatever it does."""
        self._do("kill-server", is_checked=False)

    def _do(self, *args: str, is_checked: bool = True) -> str:
        done = subprocess.run(
            [*self._tmux, *args], env=self._env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 or not is_checked, done.stderr
        return done.stdout
