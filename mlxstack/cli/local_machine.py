"""Actions of the dashboard on its own computer: presets, modes, log."""

import asyncio
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import IO

from mlxstack.config import modes, presets
from mlxstack.core.errors import Broken, StackError
from mlxstack.core.formatting import size
from mlxstack.host.hardware import this_memory
from mlxstack.host.home import Home
from mlxstack.host.log_lines import for_people, read
from mlxstack.host.logs import tail
from mlxstack.planner.ranking import PresetFit, preset_fits
from mlxstack.tui.actions.action import LocalActions

COMMAND = (sys.executable, "-m", "mlxstack.cli.main")
POLL_S = 0.1
LOG_LINES = 200
SIZE = 9
"""Characters of a size in a list."""
UNKNOWN = PresetFit(None, None, is_downloaded=False)


def here(home: Home, service: str) -> LocalActions:
    """Actions on this computer, with its present presets and modes.

    `service` is the name of the attached service, which a swap of its model does not change.
    """
    log_file = home.log_file(service)
    return LocalActions(
        presets=tuple(sorted(presets.listed(home))),
        modes=tuple(sorted(modes.listed(home))),
        describe=partial(_describe, home),
        log=partial(_log, log_file),
        switch_mode=partial(_switch_mode, home),
    )


def _log(path: Path) -> list[str]:
    """Rows of the last lines; a traceback has several."""
    lines = (for_people(read(line)) for line in tail(path, LOG_LINES))
    return [row for line in lines for row in line.split("\n")]


def _describe(home: Home, names: tuple[str, ...]) -> dict[str, str]:
    """Presets with size, fit and download state of their models.

    A child process computes the sizes of models that are not downloaded: it takes seconds.
    """
    fits = preset_fits(home, names, this_memory(os.environ))
    texts = {}
    for name in names:
        try:
            model = presets.load(name, home).preset.model.id
        except StackError as error:
            texts[name] = error.message
        else:
            texts[name] = _described(fits.get(name, UNKNOWN), model)
    return texts


async def _switch_mode(home: Home, mode: str) -> str:
    """Output of a command. Raises Broken with its error.

    The command runs to its end, also when the dashboard is left meanwhile.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        # A subprocess of asyncio's own would be killed with its loop.
        process = subprocess.Popen(  # noqa: ASYNC220
            [*COMMAND, "mode", "switch", "--", mode],
            env={**os.environ, "MLX_STACK_HOME": str(home.root)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        )
        while process.poll() is None:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        lines = _lines(errors if process.returncode else output)
    if process.returncode:
        raise Broken(lines[-1].removeprefix("error: ") if lines else "the command failed")
    return ", ".join(lines)


def _described(facts: PresetFit, model: str) -> str:
    """Weight bytes, fit of the preset, and presence on disk."""
    weights = "size unknown"
    if facts.weights_bytes is not None:
        weights = size(facts.weights_bytes)
    fit = {True: "fits", False: "too big", None: ""}[facts.fits]
    place = "not downloaded"
    if facts.is_downloaded:
        place = "on disk"
    return f"{weights:>{SIZE}}  {fit:<7}  {place:<14}  {model}"


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return [line.strip() for line in file.read().decode(errors="replace").splitlines()]
