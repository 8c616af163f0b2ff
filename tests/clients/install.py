"""Install the coding agents of package.json with npm: `python -m tests.clients.install [--newest]`.

Where npm cannot, the tests of these clients are skipped, and `missing` in their folder says why:
the last line of `make test`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.environment import option

PINNED = Path(sys.prefix, "agents")
NEWEST = Path(sys.prefix, "agents-newest")
FOLDER = Path(option("AGENTS") or PINNED)
"""Where the tests find the clients."""
LISTS = ("package.json", "package-lock.json")
CLIENTS = {
    "@anthropic-ai/claude-code": "Claude Code",
    "@openai/codex": "Codex",
    "opencode-ai": "opencode",
    "@earendil-works/pi-coding-agent": "pi",
    "@qwen-code/qwen-code": "qwen-code",
    "@continuedev/cli": "Continue",
}
"""Names that people know, by package."""
REMEDY = "install Node.js with npm, check its registry (npm ping), and type: make programs"
QUIET = ("--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error")
# With its own patience npm tries for minutes, package by package.
ASK = ("view", "opencode-ai", "version", "--fetch-retries=0", "--fetch-timeout=20000")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--newest", action="store_true", help="the newest versions, not the pinned")
    is_newest = parser.parse_args().newest
    folder = NEWEST if is_newest else PINNED
    problem = install(folder, is_newest=is_newest)
    missing = folder / "missing"
    if problem is None:
        missing.unlink(missing_ok=True)
        (folder / "ready").touch()
        if is_newest:
            sys.stdout.write(f"newest clients: {', '.join(versions(folder))}\n")
        return
    shutil.rmtree(folder / "node_modules", ignore_errors=True)
    missing.write_text(f"{problem}\n")
    sys.stdout.write(f"{reason_missing(folder)}\n")


def install(folder: Path, *, is_newest: bool) -> str | None:
    """Install into a folder; the reason why not, or None."""
    folder.mkdir(parents=True, exist_ok=True)
    npm = shutil.which("npm")
    if npm is None:
        return "npm is not installed"
    for name in LISTS:
        shutil.copy(Path(__file__).with_name(name), folder / name)
    # `npm ci` wants the packages of every platform in the lock, also those that no platform of a
    # developer could fetch; `npm install` keeps to the lock as well.
    is_online = _said([npm, *ASK], folder, os.environ) is None
    source = "--prefer-offline" if is_online else "--offline"
    command = [npm, "install", *QUIET, source, "--prefix", str(folder)]
    environment = dict(os.environ)
    if is_newest:
        (folder / "package-lock.json").unlink()
        command = [*command, "--prefer-online", *(f"{package}@latest" for package in CLIENTS)]
        # npm takes older versions of packages that need a newer Node.js than its own.
        path = f"{PINNED / 'node_modules' / '.bin'}{os.pathsep}{environment['PATH']}"
        environment["PATH"] = path
    problem = _said(command, folder, environment)
    if problem is None:
        _link_node(folder / "node_modules")
        return None
    return f"npm says: {problem}" if is_online else "npm does not reach its registry"


def _link_node(modules: Path) -> None:
    """Link the Node.js of this platform, which npm 9 does not do."""
    link = modules / ".bin" / "node"
    for program in modules.glob("node-*/bin/node"):
        if not link.exists():
            link.symlink_to(program)


def _said(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str | None:
    """The error of a command of npm; None without one."""
    done = subprocess.run(
        command, env=environment, cwd=folder, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if "A complete log" not in line]
    return " ".join(lines[-1:])


def versions(folder: Path) -> list[str]:
    """The clients that are installed, with their versions."""
    return [
        f"{name} {json.loads(manifest.read_text())['version']}"
        for package, name in CLIENTS.items()
        if (manifest := _manifest(folder, package)).exists()
    ]


def reason_missing(folder: Path) -> str:
    """Which clients are missing, why, and what to type; empty if none is."""
    names = [name for package, name in CLIENTS.items() if not _manifest(folder, package).exists()]
    if not names:
        return ""
    missing = folder / "missing"
    problem = missing.read_text().strip() if missing.exists() else "`make programs` has not run"
    return f"NO TEST OF {', '.join(names)}: {problem}; {REMEDY}"


def _manifest(folder: Path, package: str) -> Path:
    return folder / "node_modules" / package / "package.json"


if __name__ == "__main__":
    main()
