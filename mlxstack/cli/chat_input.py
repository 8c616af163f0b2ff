"""Prompts typed into `chat`: lines, pastes, text of an editor."""

import os
import re
import select
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from mlxstack.core.errors import SetupError

BLOCK = '"""'
"""Opens and closes a prompt of several lines."""

PASTE_GAP_S = 0.05
"""A line that is there so soon after another was pasted with it."""

# Where Alt-Enter sends Escape and Return; quoted-insert puts the line end into the prompt.
KEYS = ("set enable-bracketed-paste on", r'"\e\C-m": "\C-v\C-j"')


class PromptReader:
    """Reader of prompts from the terminal, with line editing and history."""

    def __init__(self) -> None:
        import readline

        # On macOS the module may be libedit, which has no bracketed paste.
        self._has_paste = "libedit" not in (readline.__doc__ or "")
        for key in KEYS if self._has_paste else ():
            readline.parse_and_bind(key)

    def read(self) -> str | None:
        """One prompt; None at the end of the input.

        Ctrl-C clears the line.
        """
        while True:
            try:
                text = self._line("> ")
                if text.lstrip().startswith(BLOCK):
                    return self._block(text.lstrip().removeprefix(BLOCK))
                return text
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print()

    def _line(self, shown: str) -> str:
        lines = [input(shown)]
        while not self._has_paste and select.select([sys.stdin], [], [], PASTE_GAP_S)[0]:
            lines.append(input())
        return "\n".join(lines)

    def _block(self, text: str) -> str:
        while BLOCK not in text:
            text += "\n" + self._line("... ")
        return re.sub(rf"{BLOCK}.*\Z", "", text, flags=re.DOTALL).strip("\n")


def edited(text: str = "") -> str:
    """Text as left in $VISUAL or $EDITOR. Raises SetupError."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="mlx-stack-") as folder:
        file = Path(folder) / "prompt.md"
        file.write_text(text, "utf-8")
        try:
            subprocess.run([*shlex.split(editor), str(file)], check=True)
        except (OSError, subprocess.CalledProcessError) as why:
            raise SetupError(f"the editor `{editor}` failed ({why}); set EDITOR") from why
        return file.read_text("utf-8").strip("\n")
