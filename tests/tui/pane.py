"""A terminal of 80x24 in tmux: keys go in, the screen comes out as text."""

import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PATIENCE_S = 60.0


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
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            seen = self.text()
            if is_so(seen):
                return seen
            time.sleep(0.05)
        raise AssertionError(f"never seen: {what}; last was:\n{self.text()}")

    def shows(self, words: str) -> str:
        """The screen once these words are on it."""
        return self.until(lambda seen: words in seen, words)

    def ended(self) -> None:
        """Wait until the command has ended, and its session with it."""
        deadline = time.monotonic() + PATIENCE_S
        while self._do("list-sessions", is_checked=False):
            assert time.monotonic() < deadline, f"still running:\n{self.text()}"
            time.sleep(0.05)

    def close(self) -> None:
        """End the server of this pane, whatever it does."""
        self._do("kill-server", is_checked=False)

    def _do(self, *words: str, is_checked: bool = True) -> str:
        done = subprocess.run(
            [*self._tmux, *words], env=self._env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 or not is_checked, done.stderr
        return done.stdout
