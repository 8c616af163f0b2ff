"""Self-checks and measurements with results kept for later loads."""

import hashlib
import logging
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

import mlxstack
from mlxstack.core.interfaces import CheckStore
from mlxstack.core.model_info import Identity, ModelFacts
from mlxstack.core.preset import KVSpec
from mlxstack.engine.decode.batching_check import BatchingCheck, CheckSteps, self_check
from mlxstack.engine.decode.row_grouper import GroupRows
from mlxstack.engine.device_facts import device_facts
from mlxstack.engine.loading.loader import LoadedModel
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.host.load_progress import LoadProgress

log = logging.getLogger(__name__)

Result = TypeVar("Result")

LIBRARIES = ("mlx", "mlx-metal", "mlx-cpu", "mlx-lm", "mlx-vlm")
VARIABLES = ("MLX_", "OPENBLAS_", "OMP_", "LD_PRELOAD", "DYLD_")
"""Prefixes of variables that choose kernels."""
CODE = ("engine", "features", "policy")
"""Packages that check, and that compute what is checked."""


class CheckInputs(Struct, frozen=True):
    """Inputs of a check or measurement that decide its result."""

    identity: Identity
    kv: KVSpec
    name: str
    """Which check, and by which passes."""
    device: dict[str, object]
    system: tuple[str, ...]
    libraries: dict[str, str]
    variables: dict[str, str]
    code: str

    def key(self) -> str:
        """32 hex digits that stand for these inputs."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:32]


class RememberedChecks:
    """Self-checks and measurements at load; none is made twice.

    MLX thread only.
    """

    def __init__(
        self, store: CheckStore | None, progress: LoadProgress, check_s: float, kv: KVSpec
    ) -> None:
        self._store = store
        self._progress = progress
        self._check_s = check_s
        self._kv = kv

    def check(
        self, model: LoadedModel, caches: CacheFactory, group_rows: GroupRows | None
    ) -> BatchingCheck:
        """Result of the self-check. Raises SetupError where the model cannot run.

        Only rows that batch are remembered: a refusal may have had a cause of its day, such as too
        little memory.
        """
        steps = CheckSteps(self._progress, self._check_s)
        return self.once(
            "self-check" if group_rows is None else "self-check with groups",
            model.facts,
            BatchingCheck,
            lambda: self_check(model.model, caches, model.facts.n_vocab, steps, group_rows),
            lambda result: result.is_batching and not steps.left_out,
        )

    def once(
        self,
        name: str,
        facts: ModelFacts,
        kind: type[Result],
        measure: Callable[[], Result],
        is_kept: Callable[[Result], bool] = lambda _: True,
    ) -> Result:
        """Result of `measure` for these weights, now or at a load before.

        One that is not kept is made again at the next load.
        """
        key = self._key(facts.identity, name)
        remembered = self._remembered(key, kind)
        if remembered is not None:
            log.info("%s of %s: as at a load before", name, facts.id)
            return remembered
        result = measure()
        if self._store is not None and is_kept(result):
            self._store.save(key, msgspec.json.encode(result))
        return result

    def _remembered(self, key: str, kind: type[Result]) -> Result | None:
        kept = self._store.load(key) if self._store is not None else None
        if kept is None:
            return None
        try:
            return msgspec.json.decode(kept, type=kind)
        except msgspec.MsgspecError:
            return None

    def _key(self, identity: Identity, name: str) -> str:
        system = os.uname()
        return CheckInputs(
            identity=identity,
            kv=self._kv,
            name=name,
            device=device_facts(),
            # Not the computer's name: it may change with the network.
            system=(system.sysname, system.release, system.machine),
            libraries=_versions(),
            variables={k: v for k, v in os.environ.items() if k.startswith(VARIABLES)},
            code=_code_digest(),
        ).key()


def _versions() -> dict[str, str]:
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _code_digest() -> str:
    """Digest of the files of our code, by size and time."""
    root = Path(mlxstack.__file__).parent
    digest = hashlib.sha256()
    for package in CODE:
        for file in sorted((root / package).rglob("*.py")):
            stat = file.stat()
            digest.update(f"{file.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()
