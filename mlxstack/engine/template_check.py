"""Checks of tokenizer and chat template in a child under limits.

Both are programs of its author. A template has limits at every rendering; a tokenizer that makes
ten letters of one has none in the service.
"""

import os
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path

from mlxstack.core.errors import SetupError, TemplateOverrun
from mlxstack.engine.loading.tokenizer_folder import tokenizer_of
from mlxstack.models.folder_check import refuse_special_files
from mlxstack.text.assembly import assemble_text
from mlxstack.text.limited_process import (
    LOOK_S,
    NO_MEMORY,
    Overrun,
    check_size,
    describe_exit,
    limit_cpu,
    limit_memory,
)

LOAD_CPU_S = 60
"""CPU seconds for loading a tokenizer; the slowest take ten."""
CPU_S = 10
"""CPU seconds for the probing conversations of `text.template`."""
MAX_BYTES = 4 * 1024**3
STALL_S = 120.0
"""Seconds for the whole process, slow disks included."""
OVERRUN = 78
"""Exit status after a template's overrun, with the reason on stdout."""
READ = frozenset({".json", ".jinja"})


def check_template(folder: Path) -> None:
    """Raise SetupError for a tokenizer or chat template beyond its limits.

    Whatever else is wrong with them is reported by the load.
    """
    refuse_special_files(folder)
    files = sorted(file for file in folder.iterdir() if file.suffix in READ)
    _check(folder, tuple((str(file), file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=64)
def _check(folder: Path, _files: tuple[tuple[str, int], ...]) -> None:
    """Check once per state of the files; refusals are not cached."""
    command = [sys.executable, "-m", __spec__.name, str(folder), str(CPU_S), str(MAX_BYTES)]
    # Without `close_fds` CPython spawns on macOS instead of forking a process with a model.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        close_fds=False,
    )
    with process:
        try:
            code = _wait(process, folder)
        except BaseException:
            process.kill()
            raise
        assert process.stdout is not None
        reason = process.stdout.read().decode(errors="replace")
    if code == OVERRUN:
        raise _refusal("the chat template", folder, reason)
    if code < 0 or code == NO_MEMORY:
        raise _refusal("the tokenizer", folder, describe_exit(code, CPU_S, MAX_BYTES))


def _wait(process: "subprocess.Popen[bytes]", folder: Path) -> int:
    """Exit status. Raises SetupError for a large or slow child."""
    deadline = time.monotonic() + STALL_S
    while True:
        try:
            return process.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                raise SetupError(
                    f"the tokenizer at {folder} was not loaded within {STALL_S:g} s"
                ) from None
        try:
            check_size(process.pid, MAX_BYTES)
        except Overrun as overrun:
            raise _refusal("the tokenizer", folder, str(overrun)) from None


def _refusal(part: str, folder: Path, reason: str) -> SetupError:
    return SetupError(f"{part} of the model at {folder} {reason}; choose another model")


def main() -> None:
    """`python -m mlxstack.engine.template_check FOLDER SECONDS BYTES`: probe within limits."""
    limit_memory(int(sys.argv[3]))
    try:
        limit_cpu(LOAD_CPU_S)
        tokenizer = tokenizer_of(Path(sys.argv[1]))
        limit_cpu(int(sys.argv[2]))
        assemble_text(tokenizer)
    except MemoryError:
        os._exit(NO_MEMORY)
    except TemplateOverrun as overrun:
        sys.stdout.write(overrun.reason)
        sys.exit(OVERRUN)


if __name__ == "__main__":
    main()
