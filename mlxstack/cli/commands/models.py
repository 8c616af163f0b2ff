"""`models` and `rm`: models on this machine."""

import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxstack.cli.output import confirm, note, table
from mlxstack.cli.streams import finishes
from mlxstack.cli.units import size
from mlxstack.cli.verbs import VerbResult
from mlxstack.core.formatting import tokens

if TYPE_CHECKING:
    from mlxstack.host.home import Home
    from mlxstack.models.local_models import LocalModel

DAY_S = 86_400.0
HEADS = ("MODEL", "SIZE", "WEIGHTS", "CONTEXT", "FITS", "TOOLS", "WHERE", "LAST USED")
DROPPED_FIRST = ("LAST USED", "WEIGHTS", "CONTEXT", "WHERE", "TOOLS", "SIZE")
"""Columns to drop on narrow terminals, in order."""


def models() -> VerbResult:
    """List the models on this machine.

    They are in the hub's cache, in LM Studio's folders, and in folders that were served.
    """
    from msgspec import to_builtins

    from mlxstack.cli.verification.tools.kept_results import summaries
    from mlxstack.host.home import home_from
    from mlxstack.models.local_models import all_models

    home = home_from(os.environ)
    on_disk = all_models(home)
    running = _running(home)
    tools = summaries(home)
    listed = [
        to_builtins(model)
        | {
            "fits": _fits(model),
            "is_running": _is_used(model, running),
            "tools": tools.get(model.name) or tools.get(model.path),
        }
        for model in on_disk
    ]
    return VerbResult({"models": listed}, lambda: _show(listed))


def _show(listed: list[dict[str, Any]]) -> None:
    from mlxstack.models.hub import cache_folder

    if not listed:
        note(f"no models in {cache_folder()}; `mlx-stack pull ID` gets one")
        return
    rows = [
        (
            model["name"],
            size(model["n_bytes"]),
            model["quantization"],
            tokens(model["n_trained"]) if model["n_trained"] else "-",
            "running" if model["is_running"] else model["fits"],
            model["tools"] or "",
            model["where"],
            _age(model["last_used"]),
        )
        for model in listed
    ]
    table(HEADS, rows, DROPPED_FIRST)
    for model in listed:
        if model["fault"]:
            is_ours = model["where"] != "folder"
            remedy = ""
            if is_ours:
                remedy = f"; `mlx-stack rm {model['name']}` deletes it"
            note(f"{model['name']} is unreadable: {model['fault']}{remedy}")


@finishes()
def rm(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name of `mlx-stack models`.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> VerbResult:
    """Delete a model from this machine's disk.

    A model that is running is never deleted.
    """
    from mlxstack.cli.exit_codes import Misuse
    from mlxstack.core.errors import Taken
    from mlxstack.host.home import home_from
    from mlxstack.models.local_models import delete

    local_model = _named(model)
    name = local_model.name
    running = _running(home_from(os.environ))
    service = running.get(name) or running.get(local_model.path)
    if service is not None:
        raise Taken(f"{name} is served by `{service}`; `mlx-stack down {service}` stops it first")
    if not yes:
        if not sys.stdin.isatty():
            raise Misuse("there is no terminal to ask on; `--yes` deletes without asking")
        confirm(
            f"Delete {local_model.name} ({size(local_model.n_bytes)}) from {local_model.path}?",
            abort=True,
        )
    n_freed = delete(local_model)
    text = f"{local_model.name} is deleted, {size(n_freed)} are free again"
    return VerbResult(
        {"model": local_model.name, "path": local_model.path, "n_freed": n_freed}, text
    )


def _named(model: str) -> "LocalModel":
    """The model of this name or path.

    Raises SetupError with near names for none, Misuse for several.
    """
    from mlxstack.cli.exit_codes import Misuse
    from mlxstack.config.preset_reflection import suggestion
    from mlxstack.core.errors import SetupError
    from mlxstack.models.local_models import local_models

    on_disk = local_models()
    for named in (
        [candidate for candidate in on_disk if model == candidate.path],
        [candidate for candidate in on_disk if model == candidate.name],
        [candidate for candidate in on_disk if model == candidate.name.rpartition("/")[2]],
    ):
        if len(named) == 1:
            return named[0]
        if named:
            names = ", ".join(f"{candidate.name} ({candidate.path})" for candidate in named)
            raise Misuse(f"several models are called {model}: {names}; give the path of one")
    near = suggestion(model, [candidate.name for candidate in on_disk])
    raise SetupError(f"there is no model {model} on this machine{near}")


def _running(home: "Home") -> dict[str, str]:
    """Running services by model and draft, as hub id or folder."""
    from mlxstack.host import services

    return {
        model: name
        for name, preset in services.served(home).items()
        for model in (preset.model.id, preset.model.draft, preset.model.mtp)
        if model is not None
    }


def _is_used(model: "LocalModel", running: dict[str, str]) -> bool:
    return model.name in running or model.path in running


def _fits(model: "LocalModel") -> str:
    """Whether weights leave room for KV in this machine's memory."""
    from pathlib import Path

    from mlxstack.host.hardware import this_memory
    from mlxstack.models.model_files import read_config, vision_weights

    if not model.is_complete:
        if model.fault:
            return "unreadable"
        return "incomplete"
    memory = this_memory(os.environ)
    folder = Path(model.path)
    files = read_config(folder)
    n_bytes = model.n_bytes
    if files.weights is not None:
        weights = files.weights.plus(files.head).plus(vision_weights(folder))
        n_bytes = weights.n_bytes(memory.half_bytes)
    if n_bytes < memory.usable:
        return "yes"
    return "no"


def _age(seconds: float) -> str:
    if not seconds:
        return "-"
    days = int((time.time() - seconds) / DAY_S)
    return {0: "today", 1: "yesterday"}.get(days, f"{days} days ago")
