"""Counts the files of the package between the parsed command `up` and the worker that it starts.

`main` runs the command with the arguments given, and writes the files to the path in `UP_FILES`.
"""

import inspect
import json
import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).parents[1] / "mlxstack"
UP = str(PACKAGE / "cli/commands/up.py")


class UpCounter:
    """Profiler that counts from the call of `up` to the start of the first process of ours."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.is_counting = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        # The bodies of modules and classes, which imports run, are no steps of the command.
        if event != "call" or not code.co_flags & inspect.CO_OPTIMIZED:
            return
        if code.co_filename == UP and code.co_name == "up":
            self.is_counting = True
        path = Path(code.co_filename)
        if self.is_counting and path.is_relative_to(PACKAGE):
            self.files.add(str(path.relative_to(PACKAGE)))

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Write the files when the supervisor is started."""
        if self.is_counting and event == "subprocess.Popen":
            command = " ".join(map(str, arguments[1]))
            if "mlxstack.control.supervisor" in command:
                self.is_counting = False
                Path(os.environ["UP_FILES"]).write_text(json.dumps(sorted(self.files)))


def main() -> None:
    """Run `mlx-stack` with these arguments."""
    from mlxstack.cli.main import main as command

    counter = UpCounter()
    sys.addaudithook(counter.audit)
    sys.setprofile(counter)
    command()
