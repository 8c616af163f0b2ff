"""`/v1/models/load` takes no path, no code and no file of this machine from a client."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from mlxstack.cli.main import app
from mlxstack.core.errors import BadRequest, SetupError
from mlxstack.core.preset import ModelSpec
from tests.api.running import Running, running, tiny_preset
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

EVIL = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from mlx_lm.models.llama import Model, ModelArgs
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trust")


@pytest.fixture(scope="module")
def here(home: Path) -> Iterator[Running]:
    with running(tiny_preset(home / "tiny"), home) as found:
        yield found


@pytest.fixture
def evil(here: Running, home: Path, tmp_path: Path) -> Path:
    """A folder of another user: a model with code of its own, and a preset that trusts it."""
    folder = tmp_path / "evil"
    shutil.copytree(home / "tiny", folder)
    (folder / "evil.py").write_text(EVIL)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_file": "evil.py"}))
    preset = {"model": {"id": str(folder), "trust_remote_code": True}, "name": "evil"}
    for name in ("evil.yaml", "evil.json", "evil"):
        (folder / name).write_text(json.dumps(preset))
    return folder


def load(here: Running, **body: Any) -> httpx.Response:
    return httpx.post(f"{here.url}/v1/models/load", json=body, timeout=PATIENCE_S)


def test_a_client_cannot_run_code_with_a_preset_of_its_own(
    here: Running, home: Path, evil: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(evil)
    monkeypatch.setenv("HOME", str(evil.parent))
    beside = os.path.relpath(evil, home / "presets")
    paths = [str(evil / "evil.yaml"), str(evil / "evil.json"), str(evil / "evil"), "evil.yaml"]
    for path in [*paths, "./evil", "~/evil/evil.yaml", "../evil/evil.yaml", f"{beside}/evil", ""]:
        for prepare in (True, False):
            answer = load(here, preset=path, prepare=prepare)
            assert answer.status_code == 400, (path, answer.text)
            assert "not a file" in answer.json()["error"]["message"]
    assert not (evil / "ran").exists()
    assert here.service.preset.model.alias == "tiny"


def test_a_client_cannot_name_a_folder_as_the_model(
    here: Running, evil: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(evil.parent)
    shutil.copytree(evil, evil.parent / "owner" / "evil")
    for model in (str(evil), "./evil", "evil", "owner/evil", "~/evil", "../evil", ".", "a/../evil"):
        answer = load(here, model=model)
        assert answer.status_code == 400, (model, answer.text)
        assert "cannot choose a folder" in answer.json()["error"]["message"]
    own = here.service.preset.model.id
    assert load(here, model=own, prepare=True).json()["path"] == own


def test_a_refused_preset_shows_nothing_of_a_file(here: Running, home: Path) -> None:
    secret = home / "secret"
    secret.write_text("root:*:20228:0:99999:7::: x\n")
    (home / "presets").mkdir(exist_ok=True)
    (home / "presets" / "wrong.yaml").write_text("model: {id: demo}\nkv: {bits: pear}\n")
    told = load(here, preset=str(secret), prepare=True)
    assert told.status_code == 400 and "20228" not in told.text
    told = load(here, preset="wrong", prepare=True)
    assert told.status_code == 400 and "pear" not in told.text
    assert "mlx-stack presets show wrong" in told.text


def test_a_model_of_a_client_brings_no_trust_in_its_code(here: Running) -> None:
    service = here.service
    assert service.engine_factory is not None
    trusting = replace(service.preset.model, trust_remote_code=True, adapter="mine")
    running_preset = replace(service.preset, model=trusting)
    found = service.engine_factory.with_model("someone/model", running_preset)
    assert found == replace(running_preset, model=ModelSpec(id="someone/model"))
    assert not found.model.trust_remote_code


@pytest.mark.parametrize("handover", ["../presets/tiny", "tiny", "", "0" * 32, "A" * 32])
def test_a_client_cannot_guess_a_handover(here: Running, home: Path, handover: str) -> None:
    folder = home / "run" / "presets"
    folder.mkdir(parents=True, exist_ok=True)
    # A path through it leads somewhere only once it is there, as after any swap.
    (home / "run" / "handovers").mkdir(exist_ok=True)
    (folder / "tiny.json").write_bytes(msgspec.json.encode(here.service.preset))
    answer = load(here, handover=handover, prepare=True)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "handover"


def test_swap_hands_a_file_over_through_the_home(
    here: Running, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tmp_path / "mine.yaml"
    text = f"model: {{id: {home / 'tiny'}, alias: mine}}\nslots: {{count: 2, n_ctx: 1024}}\n"
    wanted.write_text(text)
    monkeypatch.setenv("MLX_STACK_HOME", str(home))
    args = ["swap", str(wanted), "--url", here.url]
    try:
        done = CliRunner().invoke(app, args)
        assert done.exit_code == 0, done.exception
        assert "tiny was changed for mine" in done.stdout
        assert here.service.preset.server.port == 0, "it is served where the old one was"
    finally:
        load(here, preset="back").raise_for_status()
    assert list((home / "run" / "handovers").iterdir()) == []
    wanted.write_text("model: {id: demo}\nslots: {count: none}\n")
    assert isinstance(CliRunner().invoke(app, args).exception, SetupError)
    wanted.write_text(text)
    monkeypatch.setenv("MLX_STACK_HOME", str(tmp_path / "another"))
    refused = CliRunner().invoke(app, args).exception
    assert isinstance(refused, BadRequest) and "another home" in str(refused)


@pytest.fixture(scope="module", autouse=True)
def back(here: Running, home: Path) -> None:
    """A preset of the first model, to go back to it."""
    (home / "presets").mkdir(exist_ok=True)
    text = f"model: {{id: {home / 'tiny'}, alias: tiny}}\nslots: {{count: 3, n_ctx: 1024}}\n"
    (home / "presets" / "back.yaml").write_text(text)
