"""Exit codes after which launchd or systemd must not restart a service.

systemd is told by RestartPreventExitStatus. launchd knows one distinction only, success or not:
under it such an end is reported as success.
"""

from collections.abc import MutableMapping

HOPELESS_CODES = (2, 4, 5)
"""Exit codes of `up` that no retry can fix (cli/exit_codes.py).

Usage, taken, setup.
"""

LAUNCHD_VARIABLE = "MLX_STACK_LAUNCHD"
"""Variable of a launchd agent's environment; children do not inherit it."""


def take_launchd_flag(env: MutableMapping[str, str]) -> bool:
    """Remove the variable from `env`; whether launchd started this process."""
    return env.pop(LAUNCHD_VARIABLE, "") == "1"


def launchd_code(code: int) -> int:
    """The exit code to give launchd, which restarts everything but 0."""
    if code in HOPELESS_CODES:
        return 0
    return code
