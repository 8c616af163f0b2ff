"""Imitation of macOS in child processes: a folder for PYTHONPATH.

Python imports it first. What branches on the system when it is imported stays that of Linux; the
programs of macOS are those in `IMITATED_PROGRAMS`.
"""

import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

PROGRAMS = Path(os.environ["IMITATED_PROGRAMS"])
REPORTS = Path(os.environ["IMITATED_REPORTS"])
SYSCTL = {b"kern.memorystatus_vm_pressure_level": 1, b"iogpu.wired_limit_mb": 0}
WITHOUT_ENGINE = {"doctor", "--mac"}
"""Words of commands that leave MLX to other processes."""


class ImitatedPrograms(subprocess.Popen):  # type: ignore[type-arg]
    """Runs the imitation of a program by its absolute path."""

    def __init__(self, command: Any, *values: Any, **options: Any) -> None:
        imitation = PROGRAMS / Path(command[0]).name
        if str(command[0]).startswith(("/usr/", "/bin/")) and imitation.is_file():
            command = [str(imitation), *command[1:]]
        super().__init__(command, *values, **options)


def imitate() -> None:
    """Take this computer for a Mac."""
    import psutil  # noqa: F401  (it chooses its module by the system)

    from mlxstack.host import memory_pressure

    # Before the modules that import them by name.
    memory_pressure.sysctl = SYSCTL.get
    memory_pressure.sysctl_text = lambda _: "Apple M3 Max"

    from mlxstack.cli import doctor  # noqa: F401
    from mlxstack.models import hub  # noqa: F401  (its client branches on the system)

    if WITHOUT_ENGINE.isdisjoint(sys.orig_argv):
        from mlxstack.engine import chat_engine  # noqa: F401
    from mlxstack.host import diagnostic_reports, macos, sleep

    sysconfig.get_config_vars()
    subprocess.Popen = ImitatedPrograms  # type: ignore[misc]
    sys.platform = "darwin"
    platform.system = lambda: "Darwin"
    platform.machine = lambda: "arm64"
    platform.release = lambda: "25.2.0"
    macos.gpu_panics.__defaults__ = (REPORTS,)
    diagnostic_reports.FOLDERS = (REPORTS,)
    sleep.caffeinate.__defaults__ = ("darwin",)


# Programs that run by their file print the same facts on every system.
if "-P" not in sys.orig_argv:
    imitate()
