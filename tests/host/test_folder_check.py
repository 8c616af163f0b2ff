"""Files of a model folder that no library should open are refused with their name and a remedy."""

import json
import os
import socket
from pathlib import Path

import pytest

from mlxstack.core.errors import SetupError
from mlxstack.models.bounded_json import read_object
from mlxstack.models.chat_capabilities import capabilities
from mlxstack.models.folder_check import check_adapter, check_folder, check_startable, check_weights
from mlxstack.models.local_models import _state
from mlxstack.models.model_files import measured, missing_weights, read_config
from tests.host.test_foreign_json import header
from tests.models import LLAMA

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5368709120\n"
ANY = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "tokenizer.model", "chat_template.jinja", "special_tokens_map.json", "model.safetensors",
    "consolidated.safetensors", "notes.txt", "1_Pooling/config.json",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(header(b"{}"))
    check_folder(tmp_path)
    check_startable(tmp_path)
    return tmp_path


def replaced(file: Path) -> Path:
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    return file


@pytest.mark.parametrize("name", ANY)
def test_a_named_pipe_is_refused_and_never_opened(folder: Path, name: str) -> None:
    os.mkfifo(replaced(folder / name))
    for check in (check_folder, check_startable):
        with pytest.raises(SetupError, match=rf"{name} is a named pipe, not a file"):
            check(folder)
    assert capabilities(folder) in ((), ("completion",))
    if name.endswith(".json") and name != "config.json":
        with pytest.raises(SetupError, match="named pipe"):
            read_object(folder / name)


def test_a_pipe_in_place_of_weights_is_not_opened(folder: Path) -> None:
    os.mkfifo(replaced(folder / "model.safetensors"))
    for read in (measured, read_config):
        with pytest.raises(SetupError, match="named pipe"):
            read(folder)
    assert "named pipe" in _state(folder)[1]


def test_devices_and_sockets_are_refused(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.symlink_to("/dev/zero")
    with pytest.raises(SetupError, match=r"tokenizer\.json is a device"):
        check_folder(folder)
    file.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        try:
            os.chdir(folder)
            listener.bind("tokenizer.json")
        finally:
            os.chdir(here)
        with pytest.raises(SetupError, match=r"tokenizer\.json is a socket"):
            check_folder(folder)


def test_a_broken_link_is_no_special_file(folder: Path) -> None:
    (folder / "README.md").symlink_to(folder / "gone")
    check_folder(folder)


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja",
        "model.safetensors", "model.safetensors.index.json",
    ],
)  # fmt: skip
def test_a_pointer_of_git_lfs_is_called_that(folder: Path, name: str) -> None:
    (folder / name).write_text(POINTER)
    for check in (check_folder, check_startable):
        with pytest.raises(SetupError, match=rf"{name} is a pointer of Git LFS.*git lfs pull"):
            check(folder)
    if name == "model.safetensors":
        with pytest.raises(SetupError, match="pointer of Git LFS"):
            measured(folder)


@pytest.mark.parametrize("content", [POINTER.encode(), b"\xff" * 8, b""])
def test_safetensors_that_mlx_lm_does_not_read_count_for_nothing(
    folder: Path, content: bytes
) -> None:
    for name in ("consolidated.safetensors", "adapters.safetensors"):
        (folder / name).write_bytes(content)
    check_folder(folder)
    check_startable(folder)
    assert read_config(folder).weights is not None


def test_the_pointer_of_an_adapter_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "adapters.safetensors").write_text(POINTER)
    with pytest.raises(SetupError, match=r"adapters\.safetensors is a pointer of Git LFS"):
        check_adapter(tmp_path)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["pytorch_model.bin"],
            r"pytorch_model\.bin, but no model\*\.safetensors.*mlx_lm\.convert",
        ),
        (["pytorch_model-1.bin", "pytorch_model-2.bin"], r"pytorch_model-1\.bin and 1 more"),
        (["consolidated.safetensors"], r"consolidated\.safetensors, but no"),
        (["consolidated.00.pth"], r"consolidated\.00\.pth, but no"),
        (["weights.npz"], r"weights\.npz, but no"),
        (["model.Q4_K_M.gguf"], "holds GGUF files"),
    ],
)
def test_weights_of_others_are_refused_with_a_remedy(
    folder: Path, names: list[str], said: str
) -> None:
    for name in names:
        (folder / name).write_bytes(b"PK")
    check_startable(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(SetupError, match=said):
        check_startable(folder)


def test_a_folder_without_weights_is_no_model_to_start(folder: Path) -> None:
    check_weights(folder)
    (folder / "model.safetensors").unlink()
    check_startable(folder)
    with pytest.raises(SetupError, match="holds no weights"):
        check_weights(folder)


def test_arguments_of_a_training_are_no_weights(folder: Path) -> None:
    (folder / "training_args.bin").write_bytes(b"PK")
    (folder / "model.safetensors").unlink()
    check_startable(folder)


def test_twenty_thousand_shards_are_named_once(folder: Path) -> None:
    """Each shard names all of them, which would be 400 million names."""
    (folder / "model.safetensors").unlink()
    for number in range(1, 20_000):
        (folder / f"model-{number:05}-of-20000.safetensors").touch()
    assert missing_weights(folder) == ["model-20000-of-20000.safetensors"]
