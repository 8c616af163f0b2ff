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
HEADS = ("MODEL", "SIZE", "WEIGHTS", "CONTEXT", "FITS", "WHERE", "LAST USED")
LEAST = ("LAST USED", "WEIGHTS", "CONTEXT", "WHERE", "SIZE")
"""Columns to drop on narrow terminals, in order."""


def models() -> VerbResult:
    """List the models on this machine.

    They are in the hub's cache, in LM Studio's folders, and in folders that were served.
    """
    from msgspec import to_builtins

    from mlxstack.host.home import home_from
    from mlxstack.models.local_models import all_models

    home = home_from(os.environ)
    found = all_models(home)
    running = _running(home)
    told = [
        to_builtins(one) | {"fits": _fits(one), "is_running": _is_used(one, running)}
        for one in found
    ]
    return VerbResult({"models": told}, lambda: _show(told))


def _show(found: list[dict[str, Any]]) -> None:
    from mlxstack.models.hub import cache_folder

    if not found:
        note(f"no models in {cache_folder()}; `mlx-stack pull ID` gets one")
        return
    rows = [
        (
            one["name"],
            size(one["n_bytes"]),
            one["quantization"],
            tokens(one["n_trained"]) if one["n_trained"] else "-",
            "running" if one["is_running"] else one["fits"],
            one["where"],
            _age(one["last_used"]),
        )
        for one in found
    ]
    table(HEADS, rows, LEAST)
    for one in found:
        if one["fault"]:
            is_ours = one["where"] != "folder"
            remedy = f"; `mlx-stack rm {one['name']}` deletes it" if is_ours else ""
            note(f"{one['name']} is unreadable: {one['fault']}{remedy}")


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

    found = _named(model)
    running = _running(home_from(os.environ))
    service = running.get(found.name) or running.get(found.path)
    if service is not None:
        raise Taken(
            f"{found.name} is served by `{service}`; `mlx-stack down {service}` stops it first"
        )
    if not yes:
        if not sys.stdin.isatty():
            raise Misuse("there is no terminal to ask on; `--yes` deletes without asking")
        confirm(f"Delete {found.name} ({size(found.n_bytes)}) from {found.path}?", abort=True)
    n_freed = delete(found)
    told = f"{found.name} is deleted, {size(n_freed)} are free again"
    return VerbResult({"model": found.name, "path": found.path, "n_freed": n_freed}, told)


def _named(model: str) -> "LocalModel":
    """The model of this name or path.

    Raises SetupError with near names for none, Misuse for several.
    """
    from mlxstack.cli.exit_codes import Misuse
    from mlxstack.config.preset_schema import suggestion
    from mlxstack.core.errors import SetupError
    from mlxstack.models.local_models import local_models

    found = local_models()
    for named in (
        [one for one in found if model == one.path],
        [one for one in found if model == one.name],
        [one for one in found if model == one.name.rpartition("/")[2]],
    ):
        if len(named) == 1:
            return named[0]
        if named:
            told = ", ".join(f"{one.name} ({one.path})" for one in named)
            raise Misuse(f"several models are called {model}: {told}; give the path of one")
    near = suggestion(model, [one.name for one in found])
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
    from mlxstack.models.model_files import measured, vision_weights

    if not model.is_complete:
        return "unreadable" if model.fault else "incomplete"
    memory = this_memory(os.environ)
    folder = Path(model.path)
    weights = measured(folder)
    n_bytes = model.n_bytes
    if weights is not None:
        n_bytes = weights.plus(vision_weights(folder)).n_bytes(memory.half_bytes)
    return "yes" if n_bytes < memory.usable else "no"


def _age(seconds: float) -> str:
    if not seconds:
        return "-"
    days = int((time.time() - seconds) / DAY_S)
    return {0: "today", 1: "yesterday"}.get(days, f"{days} days ago")
