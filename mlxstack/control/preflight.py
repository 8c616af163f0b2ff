"""Checks before a load: model folder, slot files' folder, port."""

import errno
import tempfile
from pathlib import Path

from mlxstack.config.preset_paths import BUILTIN_MODEL, is_folder
from mlxstack.core.errors import SetupError, Taken
from mlxstack.core.preset import Preset, ServerSpec
from mlxstack.host.home import Home, make_private
from mlxstack.host.process import listener, refusal
from mlxstack.host.services import running
from mlxstack.models.model_files import refuse_gguf


def check(preset: Preset, home: Home) -> None:
    """Check a start, creating the slot folder. Raises SetupError, Taken."""
    check_model(preset)
    check_slot_folder(preset)
    check_port(preset.server, home)


def check_model(preset: Preset) -> None:
    """Check a model folder, or the form of a hub id."""
    model = preset.model
    _check_model_id("model.id", model.id)
    for key, given in (("model.draft", model.draft), ("model.mtp", model.mtp)):
        if given is not None:
            _check_model_id(key, given)
    if model.adapter is not None:
        _check_adapter_folder(Path(model.adapter))


def check_slot_folder(preset: Preset) -> None:
    """Check that the slot folder exists (0700 if new), is writable."""
    folder = Path(preset.slots.save_path or ".")
    try:
        make_private(folder)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except SetupError as why:
        raise SetupError(f"slots.save_path: {why.message}") from why
    except OSError as why:
        raise SetupError(
            f"slots.save_path: {folder} cannot be written to ({why.strerror})"
        ) from why


def check_port(server: ServerSpec, home: Home) -> None:
    """Check that the port is free, else name process and remedy."""
    why = refusal(server.host, server.port)
    if why is None:
        return
    if why.errno != errno.EADDRINUSE:
        raise SetupError(
            f"server: nothing can listen on {server.host}:{server.port} ({why.strerror}); "
            "choose another --host or --port"
        )
    for state in running(home):
        if state.plan.url.endswith(f":{server.port}"):
            raise Taken(
                f"port {server.port} is taken by the service `{state.plan.name}` "
                f"(pid {state.supervisor.pid}); stop it with `mlx-stack down {state.plan.name}`, "
                "or choose another port with --port"
            )
    who = listener(server.port) or "another program"
    raise Taken(
        f"{server.host}:{server.port} cannot be used: port {server.port} is taken by {who}; "
        "end that, or choose another port with --port"
    )


def _check_model_id(key: str, model_id: str) -> None:
    if not is_folder(model_id):
        if model_id != BUILTIN_MODEL and model_id.count("/") != 1:
            raise SetupError(
                f"{key} is `{model_id}`, but must be `{BUILTIN_MODEL}`, a folder that starts with "
                "`/`, `./` or `~/`, or a hub id such as `mlx-community/name`"
            )
        return
    folder = Path(model_id)
    if not folder.is_dir():
        raise SetupError(f"{key}: there is no folder {folder}; download the model, or correct it")
    try:
        refuse_gguf(folder)
    except SetupError as why:
        raise SetupError(f"{key}: {why.message}") from why


def _check_adapter_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise SetupError(f"model.adapter: there is no folder {folder}")
    for name in ("adapter_config.json", "adapters.safetensors"):
        if not (folder / name).is_file():
            raise SetupError(
                f"model.adapter: {folder} holds no {name}; give the folder that "
                "`mlx_lm.lora --adapter-path` wrote"
            )
