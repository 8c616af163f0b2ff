"""Checks a chat template in a child process with a CPU limit.

A template is a program: one that loops for ever would keep a thread of the service for ever.
"""

import math
import resource
import signal
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path

from mlx_lm import utils as mlx_utils

from mlxstack.core.errors import SetupError
from mlxstack.text.prompt import PromptMaker

CPU_S = 10
"""CPU seconds for the probing conversations of `text.template`."""
STALL_S = 120.0
"""Seconds for the whole process, slow disks included."""
READ = frozenset({".json", ".jinja"})


def check_template(folder: Path) -> None:
    """Raise SetupError when a model's chat template does not terminate.

    Whatever else is wrong with it is reported by the load.
    """
    files = sorted(file for file in folder.iterdir() if file.suffix in READ)
    _check(folder, tuple((str(file), file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=64)
def _check(folder: Path, _files: tuple[tuple[str, int], ...]) -> None:
    """Check once per state of the files; refusals are not cached."""
    command = [sys.executable, "-m", __spec__.name, str(folder), str(CPU_S)]
    nothing = subprocess.DEVNULL
    try:
        code = subprocess.run(
            command, stdin=nothing, stdout=nothing, stderr=nothing, timeout=STALL_S, check=False
        ).returncode
    except subprocess.TimeoutExpired as error:
        raise SetupError(
            f"the tokenizer at {folder} was not loaded within {STALL_S:g} s"
        ) from error
    if code == -signal.SIGXCPU:
        raise SetupError(
            f"the chat template of the model at {folder} does not end within {CPU_S} s of CPU "
            "time; choose a model with another template"
        )
    if code < 0:
        raise SetupError(
            f"trying the chat template of the model at {folder} was ended by "
            f"{signal.Signals(-code).name}"
        )


def main() -> None:
    """`python -m mlxstack.engine.template_check FOLDER SECONDS`: render, within CPU seconds."""
    tokenizer = mlx_utils.load_tokenizer(Path(sys.argv[1]))
    limit = math.ceil(time.process_time()) + int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    PromptMaker(tokenizer)


if __name__ == "__main__":
    main()
