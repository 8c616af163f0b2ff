"""A real service whose model follows a script, and the programs that talk to it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxstack.core.preset import ModelSpec, Preset, SamplingSpec, ServerSpec, SlotSpec
from mlxstack.demo import MODEL_DIR
from tests import vision_models
from tests.api.running import Running, running
from tests.environment import option
from tests.patience import PATIENCE_S

PROGRAMS = Path(option("CLIENTS") or Path(sys.prefix) / "clients")
"""The environment that `make programs` builds: aider and litellm pin what we do not."""

Script = list[dict[str, Any]]


def model(folder: Path, script: Script, *, sees: bool = False) -> Path:
    """The folder of a model that follows `script`; one that sees reads `[IMG]` for each feature."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL_DIR / name, folder / name)
    shutil.copy(Path(__file__).with_name("scripted.py"), folder / "scripted.py")
    mx.save_safetensors(str(folder / "model.safetensors"), {"scale": mx.ones((1,))})
    config = {
        "model_type": "llama",
        "model_file": "scripted.py",
        "tokenizer": str(folder / "tokenizer.json"),
        "script": script,
        "vocab_size": 1024,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "eos_token_id": 2,
        "max_position_embeddings": 262144,
    }
    if sees:
        config |= vision_models.beside(folder, 32)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def playing(
    folder: Path, script: Script, n_ctx: int = 32768, *, sees: bool = False
) -> Iterator[Running]:
    """A running service of three slots that follows `script`."""
    with playing_model(model(folder / "model", script, sees=sees), folder, n_ctx) as playing_stage:
        yield playing_stage


@contextmanager
def playing_model(
    model_folder: Path, folder: Path, n_ctx: int = 32768, *, thinking: bool | None = None
) -> Iterator[Running]:
    """A running service of a model's folder, with its home in `folder`."""
    preset = Preset(
        model=ModelSpec(id=str(model_folder), alias="local-model", trust_remote_code=True),
        slots=SlotSpec(count=3, n_ctx=n_ctx),
        sampling=SamplingSpec(temperature=0, thinking=thinking),
        server=ServerSpec(port=0),
    )
    with running(preset, folder / "home") as live:
        yield live


def program(name: str) -> Path:
    """The installed program; skips the test, or fails it under CI, if there is none."""
    path = PROGRAMS / "bin" / name
    if not path.exists():
        assert not os.environ.get("CI"), f"{path} is missing; `make programs` installs it"
        pytest.skip(f"{path} is not installed; `make programs` installs it")
    return path


def run(command: list[str], folder: Path, typed: str = "", **env: str) -> str:
    """What a program prints that ends well; its home is `folder`, its input is `typed`."""
    done = ended(command, folder, typed, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ended(
    command: list[str], folder: Path, typed: str = "", **env: str
) -> "subprocess.CompletedProcess[str]":
    """The end of a program, good or bad; its home is `folder`, its input is `typed`."""
    return subprocess.run(
        command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "NO_COLOR": "1", **env},
        input=typed,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
