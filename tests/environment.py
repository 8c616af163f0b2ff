"""Environment of a test process, without settings, home and caches of its user.

A variable of theirs would change the behavior of a command, and a test could write to their home.
`isolate` replaces both; child processes inherit the new ones. Variables that steer the tests have
other names there (TESTS_CAPTURES for MLX_STACK_CAPTURES): a command warns of those that it does
not read.
"""

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

KEPT = {
    # Programs, temporary files, certificates, and the user's name.
    "PATH",
    "TMPDIR",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "LOGNAME",
    "USER",
    # How Python starts.
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "CI",
    "TEXTUAL_SNAPSHOT_TEMPDIR",
}
"""Variables that a test process inherits."""
PREFIX = "MLX_STACK_"
OWN_PREFIX = "TESTS_"
OPTIONS = ("AGENTS", "BIN", "CAPTURES", "CLIENTS", "FORMATS", "TOKENIZERS")
"""Where programs, clients and recordings of the tests lie; variables without their prefix."""
OPTION_PREFIX = "TEST_"
"""What the tests are asked to do: TEST_DEVICE, TEST_FORKS, TEST_PATIENCE_S."""
KEPT_PREFIXES = (
    # Folders that the processes of one run share, and options of the tests.
    OWN_PREFIX,
    "PYTEST_",
    "COVERAGE_",
    # Libraries that are loaded before Python, their allocators and threads, and GPUs.
    "CUDA_",
    "DYLD_",
    "GLIBC_",
    "LD_",
    "MALLOC_",
    "METAL_",
    "MTL_",
    "NVIDIA_",
    "NVPL_",
    "OMP_",
    "OPENBLAS_",
    "VECLIB_",
)
FIXED = {"LANG": "C.UTF-8", "TERM": "xterm", "TZ": "UTC"}
"""Equal on every machine."""
HOMES = "TESTS_HOMES"
"""Variable with the folder of the homes, one for each test process."""


def own(env: Mapping[str, str], home: str) -> dict[str, str]:
    """The environment of a test process whose home is `home`, made from that of its user."""
    variables = {}
    for name, value in env.items():
        key = name.removeprefix(PREFIX)
        if key != name and (key in OPTIONS or key.startswith(OPTION_PREFIX)):
            variables[OWN_PREFIX + key] = value
        elif name in KEPT or name.startswith(KEPT_PREFIXES):
            variables[name] = value
    return variables | FIXED | {"HOME": home}


def option(key: str) -> str | None:
    """Value of MLX_STACK_`key` in the environment of who runs the tests."""
    return os.environ.get(OWN_PREFIX + key, os.environ.get(PREFIX + key))


def isolate() -> None:
    """Give this process an environment and an empty home of its own, deleted at its end."""
    if HOMES not in os.environ:
        os.environ[HOMES] = tempfile.mkdtemp(prefix="tests-homes-")
        atexit.register(_delete, os.environ[HOMES], os.getpid())
    home = tempfile.mkdtemp(dir=os.environ[HOMES])
    variables = own(os.environ, home)
    os.environ.clear()
    os.environ.update(variables)
    time.tzset()


def default_home() -> Path:
    """Home of services that a test would share with others of its process."""
    return Path.home() / ".mlx-stack"


def _delete(folder: str, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)
