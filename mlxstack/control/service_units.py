"""Login services: launchd agents on macOS, systemd user units on Linux."""

import os
import plistlib
import sys
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from mlxstack.control.final_exit_codes import HOPELESS_CODES, LAUNCHD_VARIABLE
from mlxstack.core.errors import SetupError
from mlxstack.host.descriptors import OPEN_FILES

SPARE_S = 5.0
"""Seconds beyond the drain before the system kills what is left."""

LAUNCHD_EXIT_S = 20.0
"""launchd's own ExitTimeOut."""

LABEL = "mlx-stack"
RETRY_S = 30


class LoginJob(Struct, frozen=True):
    """Command that runs from login to logout."""

    name: str
    command: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    log: str
    """File for errors from before the service's own log: launchd has no journal."""
    stop_s: float
    """Seconds that the service may drain."""


class ServiceUnit(Struct, frozen=True):
    """Unit file of the system's supervisor, with start and stop commands."""

    name: str
    path: Path
    text: str
    start: tuple[tuple[str, ...], ...]
    stop: tuple[tuple[str, ...], ...]
    """May return while the service still drains."""
    remark: str
    probe: tuple[str, ...] = ()
    """Command that succeeds until the service has ended; empty where `stop` waits."""


def unit_of(job: LoginJob, env: Mapping[str, str], platform: str = sys.platform) -> ServiceUnit:
    """Unit of a job on this system. Raises SetupError without support."""
    if platform == "darwin":
        return launchd(job, Path(env.get("HOME") or "~").expanduser(), os.getuid())
    if platform == "linux":
        config = env.get("XDG_CONFIG_HOME") or str(Path(env.get("HOME") or "~") / ".config")
        return systemd(job, Path(config).expanduser())
    raise SetupError(f"services are installed on macOS and Linux, not on {platform}")


def launchd(job: LoginJob, home: Path, user: int) -> ServiceUnit:
    """launchd agent, `Interactive` so that macOS does not throttle it."""
    label = f"{LABEL}.{job.name}"
    path = home / "Library" / "LaunchAgents" / f"{label}.plist"
    content = {
        "Label": label,
        "ProgramArguments": list(job.command),
        "WorkingDirectory": job.cwd,
        "EnvironmentVariables": job.env | {LAUNCHD_VARIABLE: "1"},
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RETRY_S,
        "ExitTimeOut": int(job.stop_s + SPARE_S),
        "ProcessType": "Interactive",
        "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
        "Umask": 0o077,
        "StandardOutPath": "/dev/null",
        "StandardErrorPath": job.log,
    }
    domain = f"gui/{user}"
    return ServiceUnit(
        name=job.name,
        path=path,
        text=plistlib.dumps(content, sort_keys=False).decode(),
        start=(("launchctl", "bootstrap", domain, str(path)),),
        stop=(("launchctl", "bootout", f"{domain}/{label}"),),
        probe=("launchctl", "print", f"{domain}/{label}"),
        remark="it starts when you log in at the screen and ends when you log out; by SSH alone, "
        "without that login, launchctl says `125: Domain does not support specified action`",
    )


def exit_timeout_s(unit: Path) -> float:
    """Seconds until launchd kills the stopping agent."""
    try:
        value = plistlib.loads(unit.read_bytes()).get("ExitTimeOut")
    except (OSError, ValueError, plistlib.InvalidFileException):
        value = None
    if isinstance(value, int):
        return float(value)
    return LAUNCHD_EXIT_S


def systemd(job: LoginJob, config: Path) -> ServiceUnit:
    """systemd user unit; SIGTERM goes to the supervisor alone."""
    name = f"{LABEL}-{job.name}.service"
    lines = [
        "[Unit]",
        f"Description=mlx-stack: {_plain(job.name)}",
        f"StartLimitIntervalSec={RETRY_S * 20}",
        "StartLimitBurst=5",
        "",
        "[Service]",
        # There `$` begins a variable too.
        f"ExecStart={' '.join(_word(argument.replace('$', '$$')) for argument in job.command)}",
        f"WorkingDirectory={_plain(job.cwd)}",
        *(f"Environment={_word(f'{key}={value}')}" for key, value in job.env.items()),
        "StandardOutput=journal",
        "StandardError=journal",
        "UMask=0077",
        "KillMode=mixed",
        f"TimeoutStopSec={int(job.stop_s + SPARE_S)}",
        "Restart=on-failure",
        f"RestartSec={RETRY_S}",
        f"RestartPreventExitStatus={' '.join(map(str, HOPELESS_CODES))}",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    control = ("systemctl", "--user")
    return ServiceUnit(
        name=job.name,
        path=config / "systemd" / "user" / name,
        text="\n".join(lines) + "\n",
        start=(
            (*control, "daemon-reload"),
            (*control, "enable", name),
            (*control, "restart", name),
        ),
        stop=((*control, "disable", "--now", name),),
        remark="it runs while you are logged in; `loginctl enable-linger` keeps it beyond that; "
        f"`journalctl --user -u {name}` shows its log, as `mlx-stack logs {job.name}` does",
    )


def _word(text: str) -> str:
    """Quoted as in systemd.syntax(7)."""
    escaped = _plain(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _plain(text: str) -> str:
    """`%` begins a specifier everywhere in a unit."""
    if "\n" in text:
        raise SetupError(f"{text!r} holds a line break, which no unit file can carry")
    return text.replace("%", "%%")
