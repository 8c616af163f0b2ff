"""A terminal of its own for a test: `mlx-stack` with a private home and the tests' worker."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests import forked
from tests.patience import PATIENCE_S
from tests.ports import unused_port

WORKER = Path(__file__).parent.parent / "host" / "worker.py"
CLI = (sys.executable, "-m", "mlxstack.cli.main")


def run(
    args: Sequence[str], env: Mapping[str, str], folder: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """The end of a command as it is typed."""
    return subprocess.run(
        [sys.executable, str(forked.COMMAND), *args],
        env=env,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


class Shell:
    """A terminal with its own home, where `mlx-stack` starts the tests' worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.port = unused_port()
        self.preset = folder / "tiny.yaml"
        self.preset.write_text(
            f"extends: demo\nslots: {{count: 3, n_ctx: 1024}}\n"
            f"server: {{port: {self.port}, startup_timeout_s: 120, drain_s: 1}}\n"
        )
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MLX_STACK_")}
        self.env = kept | {
            "MLX_STACK_HOME": str(self.home),
            "MLX_STACK_WORKER": f"{sys.executable} {WORKER}",
            "COLUMNS": "200",
        }

    def run(self, *args: str, **env: str) -> "subprocess.CompletedProcess[str]":
        return run(args, self.env | env, self.folder)

    def up(self, *args: str, **env: str) -> "subprocess.CompletedProcess[str]":
        return self.run("up", str(self.preset), *args, **env)

    def services(self) -> dict[str, Any]:
        found = json.loads(self.run("status", "--json").stdout)["services"]
        return {one["name"]: one for one in found}

    def own_processes(self) -> list[psutil.Process]:
        """Everything alive that was started for this home."""
        found = []
        for process in psutil.process_iter():
            try:
                if str(self.home) in " ".join(process.cmdline()) and process.is_running():
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill(self) -> None:
        """End all of them; some end with others before their turn."""
        for process in self.own_processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
