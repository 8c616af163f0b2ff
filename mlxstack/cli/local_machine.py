"""Local actions of the dashboard: presets and modes."""

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from msgspec import Struct

from mlxstack.config import modes, presets
from mlxstack.core.errors import Broken, StackError
from mlxstack.core.formatting import size
from mlxstack.host.home import Home
from mlxstack.host.log_lines import shortened
from mlxstack.host.logs import tail
from mlxstack.host.memory_budget import this_memory
from mlxstack.planner.memory_check import PresetFit, preset_fits

COMMAND = (sys.executable, "-m", "mlxstack.cli.main")
POLL_S = 0.1
LOG_LINES = 200
SIZE = 9
"""Characters of a size in a list."""
UNKNOWN = PresetFit(None, None, is_downloaded=False)


class LocalActions(Struct, frozen=True):
    """A `mlxstack.tui.actions.LocalMachine`; names as they were when it was made.

    `service` is the name of the attached service, which a swap of its model does not change.
    """

    home: Path
    service: str
    presets: tuple[str, ...]
    modes: tuple[str, ...]

    def described_presets(self) -> dict[str, str]:
        """Presets with size, fit and download state of their models.

        A child process computes the sizes of models that are not downloaded: it takes seconds.
        """
        home, found = Home(self.home), {}
        fits = preset_fits(home, self.presets, this_memory(os.environ))
        for name in self.presets:
            try:
                model = presets.load(name, home).preset.model.id
            except StackError as why:
                found[name] = why.message
            else:
                found[name] = _described(fits.get(name, UNKNOWN), model)
        return found

    def log(self) -> list[str]:
        """Last lines of the service's log, shortened, at most a page."""
        lines = tail(Home(self.home).log_file(self.service), LOG_LINES)
        return [shortened(line) for line in lines]

    async def switch_mode(self, mode: str) -> str:
        """Output of a command. Raises Broken with its error.

        The command runs to its end, also when the dashboard is left meanwhile.
        """
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = self._begin(mode, output, errors)
            # A subprocess of asyncio's own would be killed with its loop.
            while process.poll() is None:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            lines = _lines(errors if process.returncode else output)
        if process.returncode:
            raise Broken(lines[-1].removeprefix("error: ") if lines else "the command failed")
        return ", ".join(lines)

    def _begin(self, mode: str, output: IO[bytes], errors: IO[bytes]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [*COMMAND, "mode", "switch", "--", mode],
            env={**os.environ, "MLX_STACK_HOME": str(self.home)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )


def here(home: Home, service: str) -> LocalActions:
    """This computer, with all its presets and modes, and the attached service."""
    return LocalActions(
        home.root, service, tuple(sorted(presets.listed(home))), tuple(sorted(modes.listed(home)))
    )


def _described(found: PresetFit, model: str) -> str:
    """Weight bytes, fit of the preset, and presence on disk."""
    weights = "size unknown" if found.weights_bytes is None else size(found.weights_bytes)
    fit = {True: "fits", False: "too big", None: ""}[found.fits]
    place = "on disk" if found.is_downloaded else "not downloaded"
    return f"{weights:>{SIZE}}  {fit:<7}  {place:<14}  {model}"


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return [line.strip() for line in file.read().decode(errors="replace").splitlines()]
