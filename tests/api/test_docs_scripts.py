"""The scripts of the docs, run as they stand (C13)."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mlxstack.core.preset import SamplingSpec
from tests.api.running import running, tiny_preset
from tests.patience import PATIENCE_S

PAGE = Path(__file__).parents[2] / "docs" / "slots-and-agents.md"
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)


@pytest.mark.net
@pytest.mark.skipif(shutil.which("curl") is None, reason="the script needs curl")
def test_c13_the_script_that_restores_chats_and_saves(tmp_path: Path) -> None:
    script = next(b for b in BLOCK.findall(PAGE.read_text()) if "action=restore" in b)
    # The script bounds no answer, and random weights end none.
    preset = tiny_preset(tmp_path / "tiny", sampling=SamplingSpec(max_tokens=8))
    with running(preset, tmp_path / "home") as live:
        told = script.replace("localhost:7109", live.url.removeprefix("http://"))
        laps = [
            subprocess.run(
                ["bash", "-ec", told],
                capture_output=True,
                text=True,
                check=True,
                timeout=PATIENCE_S,
            ).stdout
            for _ in range(2)
        ]
    first, second = ([json.loads(one) for one in _objects(lap)] for lap in laps)
    assert first[0]["error"]["code"] == 404, "the first session has nothing to restore"
    assert second[0]["n_restored"] == first[2]["n_saved"] > 0
    assert second[2]["filename"] == "coder.bin"
    assert (tmp_path / "home" / "slots" / "tiny" / "coder.bin").is_file()


def _objects(text: str) -> list[str]:
    """JSON objects that follow each other without a separator."""
    found = []
    decoder = json.JSONDecoder()
    while text.strip():
        text = text.lstrip()
        _, end = decoder.raw_decode(text)
        found.append(text[:end])
        text = text[end:]
    return found
