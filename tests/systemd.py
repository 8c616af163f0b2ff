"""systemd's own reader of units."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def verify(unit: Path) -> None:
    """Assert that `systemd-analyze verify` accepts a unit; skip where it is not installed."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: no unit is verified")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", str(unit)],
        env=os.environ | {"XDG_RUNTIME_DIR": str(unit.parent), "HOME": str(unit.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "Failed to initialize manager" in done.stderr:
        pytest.skip(f"systemd-analyze cannot work here: {done.stderr.strip()}")
    assert unit.name not in done.stderr
    assert done.returncode == 0, done.stderr
