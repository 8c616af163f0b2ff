"""Tests of real clients that ran: `python -m tests.clients.summary` says how many, and of what.

Each test process adds a line per test to `OUTCOMES`; `--forget` deletes them before a run.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from tests.clients.install import FOLDER, reason_missing, versions

OUTCOMES = Path(sys.prefix, "client-tests")
PYTHON_NAMES = {"aider_chat": "aider", "litellm": "litellm", "hermes_agent": "Hermes"}
"""Clients in Python, by their packages."""


def note(test: str, outcome: str) -> None:
    """Remember how a test of a client ended; a test that runs again ends anew."""
    with OUTCOMES.open("a") as file:
        file.write(f"{outcome} {test}\n")


def main() -> None:
    if "--forget" in sys.argv:
        OUTCOMES.unlink(missing_ok=True)
        return
    lines = OUTCOMES.read_text().splitlines() if OUTCOMES.exists() else []
    last = dict(reversed(line.split(" ", 1)) for line in lines)
    counts = Counter(last.values())
    n_ran = counts.total() - counts["skipped"]
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    installed = (*versions(FOLDER), *_python_versions(), *_openclaw_version())
    names = ", ".join(installed) or "none installed"
    sys.stdout.write(
        f"real clients: {n_ran} tests ran{failed}, {counts['skipped']} skipped ({names})\n"
    )
    if missing := reason_missing(FOLDER):
        sys.stdout.write(f"{missing}\n")


def _python_versions() -> list[str]:
    return [
        f"{name} {path.name.removeprefix(f'{package}-').removesuffix('.dist-info')}"
        for package, name in PYTHON_NAMES.items()
        for folder in ("clients", "hermes")
        for path in Path(sys.prefix, folder, "lib").glob(
            f"python*/site-packages/{package}-*.dist-info"
        )
    ]


def _openclaw_version() -> list[str]:
    manifest = Path(sys.prefix, "openclaw", "node_modules", "openclaw", "package.json")
    return [f"OpenClaw {json.loads(manifest.read_text())['version']}"] if manifest.exists() else []


if __name__ == "__main__":
    main()
