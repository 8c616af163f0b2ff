"""A terminal of a person, in which a command asks and is answered."""

import os
import pty
import subprocess
import time

from tests.cli.terminal import CLI, Shell
from tests.patience import PATIENCE_S


class Terminal:
    """A terminal in which one command runs."""

    def __init__(self, shell: Shell, *args: str, **env: str) -> None:
        self.text = ""
        self._ours, theirs = pty.openpty()
        env = shell.env | (env or {"TERM": "dumb", "NO_COLOR": "1"})
        self.process = subprocess.Popen(
            [*CLI, *args],
            env=env,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=None,
        )
        os.close(theirs)

    def type(self, line: str) -> None:
        os.write(self._ours, f"{line}\n".encode())

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def until(self, text: str) -> str:
        """Everything up to `text`; what was read before is gone."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            try:
                self.text += os.read(self._ours, 65536).decode(errors="replace")
            except OSError:
                raise AssertionError(f"it ended without {text!r}: {self.text}") from None
        before, _, self.text = self.text.partition(text)
        return before

    def close(self) -> int:
        """Leave with Ctrl-D, which means nothing before there is a prompt."""
        self.until("> ")
        os.write(self._ours, b"\x04")
        code = self.process.wait(PATIENCE_S)
        os.close(self._ours)
        return code
