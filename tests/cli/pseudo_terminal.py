"""A terminal of a person, in which a command asks and is answered."""

import os
import pty
import subprocess
import time
from contextlib import suppress

from tests.cli.terminal import CLI, Shell
from tests.patience import PATIENCE_S

DUMB = {"TERM": "dumb", "NO_COLOR": "1"}
PROMPT = "> "
BRACKETED_PASTE = "\x1b[?2004h"


class Terminal:
    """A terminal in which one command runs; `prompt` is sent when a chat takes a line."""

    def __init__(self, shell: Shell, *args: str, **env: str) -> None:
        self.text = ""
        self.prompt = BRACKETED_PASTE if env else PROMPT
        self._ours, theirs = pty.openpty()
        env = shell.env | (env or DUMB)
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

    def rest(self) -> str:
        """Everything up to the end of the command."""
        with suppress(OSError):
            while data := os.read(self._ours, 65536):
                self.text += data.decode(errors="replace")
        return self.text

    def close(self) -> int:
        """Leave a chat, with Ctrl-D where the prompt tells that keys are read one by one."""
        if self.prompt == BRACKETED_PASTE:
            self.until(self.prompt)
            self.press(b"\x04")
        else:
            self.type("/exit")
        code = self.process.wait(PATIENCE_S)
        os.close(self._ours)
        return code
