"""A model comes from the hub, and the log says how far it is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import hub
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.net]

# The hub's client writes 10 MiB at a time.
FILES = {"config.json": b"{}", "model.safetensors": bytes(24 * 2**20)}
FETCH = """
import logging, sys
logging.basicConfig(format="%(message)s", level="INFO", stream=sys.stdout)
logging.getLogger("httpx").setLevel("WARNING")
from mlxstack.host import load_progress
from mlxstack.core.preset import ModelSpec
from mlxstack.engine.loading import hub_download
load_progress.EVERY_S = 0
print("at", hub_download.fetch(ModelSpec(id="org/tiny"), load_progress.LoadProgress()))
"""


def test_a_download_tells_how_far_it_is(tmp_path: Path) -> None:
    with hub.serving(FILES) as here:
        process = subprocess.Popen(
            [sys.executable, "-c", FETCH],
            env=os.environ | here.env(tmp_path),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert next(lines) == "looking for org/tiny on the hub\n"
        size = r"[\d.]+ [KMG]iB"
        told = rf"downloading org/tiny: \d+ %, {size} of {size}, {size}/s, \d+s left\n"
        assert any(re.fullmatch(told, line) for line in lines)
        here.go_on.set()
        last = [*lines][-1]
        assert process.wait(PATIENCE_S) == 0
        process.stdout.close()
    folder = Path(last.removeprefix("at ").strip())
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
