"""Under which conditions a benchmark ran: machine, versions, BLAS, who else was busy."""

import os
from collections.abc import Mapping
from datetime import date
from importlib import metadata
from pathlib import Path

from mlxstack import __version__
from mlxstack.bench.report import Conditions
from mlxstack.core.formatting import size
from mlxstack.host.hardware import for_mlx, this_hardware

PACKAGES = ("mlx", "mlx-lm")


def child_env(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of every process that is measured: OpenBLAS and huge pages for all."""
    return {**env, **for_mlx(env)}


def conditions(model: str, day: date, env: Mapping[str, str]) -> Conditions:
    """What this computer is now."""
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
