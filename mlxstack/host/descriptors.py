"""Limit of open files (`ulimit -n`) of a process that imports mlx-lm.

The import of mlx-lm sets the limit to 2,048 (soft) and 4,096 (hard), whatever it was before, and
fails where the hard limit is lower and may not be raised.
"""

import contextlib
import resource
from collections.abc import Iterator

from mlxstack.core.errors import SetupError

REQUIRED = 4096
"""Hard limit that mlx-lm sets at its import."""

OPEN_FILES = 8192
"""Soft limit to ask launchd for, whose default is 256."""

WANTED = (65_536, 10_240)
"""Soft limits to try; older macOS accepts at most 10,240."""


@contextlib.contextmanager
def kept_limit() -> Iterator[None]:
    """Preserve the descriptor limit during mlx-lm's import, which lowers it.

    Raises SetupError before the import where the hard limit is too low.
    """
    require_limit()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Only a privileged process may put the hard limit back.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    raise_soft_limit()


def require_limit() -> None:
    """Raise SetupError where the hard limit is below what mlx-lm needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= REQUIRED:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, REQUIRED))
    except (ValueError, OSError) as error:
        raise SetupError(
            f"the hard limit of open files (`ulimit -Hn`) is {hard}, and mlx-lm needs {REQUIRED}; "
            "raise it where this program is started (`ulimit -n` of the shell that lowered it, "
            "LimitNOFILE of a systemd unit, --ulimit nofile of a container)"
        ) from error


def raise_soft_limit() -> int:
    """Raise the soft limit up to the hard limit and `WANTED`.

    Returns the limit in force.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in WANTED:
        target = limit
        if hard != resource.RLIM_INFINITY:
            target = min(limit, hard)
        if soft != resource.RLIM_INFINITY and target > soft:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
                return target
    return soft
