"""Conditions of a benchmark: machine, versions, BLAS, load."""

import os
from collections.abc import Mapping
from datetime import date
from importlib import metadata
from pathlib import Path

from msgspec import Struct

from mlxstack import __version__
from mlxstack.core.formatting import size
from mlxstack.host.hardware import for_mlx, this_hardware

PACKAGES = ("mlx", "mlx-lm")


class Conditions(Struct, frozen=True):
    """Machine and versions; `load` is the system's average of a minute before."""

    day: str
    machine: str
    versions: dict[str, str]
    model: str
    blas: str
    load: float


def child_env(env: Mapping[str, str]) -> dict[str, str]:
    """Environment of every measured process: OpenBLAS and huge pages."""
    return {**env, **for_mlx(env)}


def conditions(model: str, day: date, env: Mapping[str, str]) -> Conditions:
    """Describe this computer now."""
    here = this_hardware()
    return Conditions(
        day=day.isoformat(),
        machine=f"{here.chip}, {here.n_cores} cores, {size(here.total_bytes)}, {here.system}",
        versions={"mlx-stack": __version__, **{name: metadata.version(name) for name in PACKAGES}},
        model=model,
        blas=_blas(child_env(env)),
        load=os.getloadavg()[0],
    )


def _blas(env: Mapping[str, str]) -> str:
    loaded = [name for name in env.get("LD_PRELOAD", "").split(":") if "openblas" in name]
    return f"{Path(loaded[0]).name} preloaded for all" if loaded else "the BLAS that MLX brings"
