"""Self-checks with results kept for later loads."""

import hashlib
import logging
import os
from importlib import metadata
from pathlib import Path

import msgspec
from msgspec import Struct

import mlxstack
from mlxstack.core.interfaces import CheckStore
from mlxstack.core.model_info import Identity
from mlxstack.core.preset import KVSpec
from mlxstack.engine import device
from mlxstack.engine.decode.batching_check import BatchingCheck, CheckSteps, self_check
from mlxstack.engine.decode.row_grouper import GroupRows
from mlxstack.engine.loading.loader import LoadedModel
from mlxstack.engine.model.cache_adapters import CacheFactory
from mlxstack.host.load_progress import LoadProgress

log = logging.getLogger(__name__)

LIBRARIES = ("mlx", "mlx-metal", "mlx-cpu", "mlx-lm", "mlx-vlm")
VARIABLES = ("MLX_", "OPENBLAS_", "OMP_", "LD_PRELOAD", "DYLD_")
"""Prefixes of variables that choose kernels."""
CODE = ("engine", "features", "policy")
"""Packages that check, and that compute what is checked."""


class CheckInputs(Struct, frozen=True):
    """Inputs of a self-check that decide its result."""

    identity: Identity
    kv: KVSpec
    can_group: bool
    device: dict[str, object]
    system: tuple[str, ...]
    libraries: dict[str, str]
    variables: dict[str, str]
    code: str

    def key(self) -> str:
        """32 hex digits that stand for these inputs."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:32]


class RememberedChecks:
    """Self-checks at load; none is made twice.

    Only rows that batch are remembered: a refusal may have had a cause of its day, such as too
    little memory. MLX thread only.
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
        """Result of the self-check. Raises SetupError where the model cannot run."""
        key = self._key(model.facts.identity, can_group=group_rows is not None)
        remembered = self._remembered(key)
        if remembered is not None:
            log.info("self-check of %s: as at a load before", model.facts.id)
            return remembered
        steps = CheckSteps(self._progress, self._check_s)
        result = self_check(model.model, caches, model.facts.n_vocab, steps, group_rows)
        is_whole = result.is_batching and not steps.left_out
        if self._store is not None and is_whole:
            self._store.save(key, msgspec.json.encode(result))
        return result

    def _remembered(self, key: str) -> BatchingCheck | None:
        kept = self._store.load(key) if self._store is not None else None
        if kept is None:
            return None
        try:
            return msgspec.json.decode(kept, type=BatchingCheck)
        except msgspec.MsgspecError:
            return None

    def _key(self, identity: Identity, *, can_group: bool) -> str:
        system = os.uname()
        return CheckInputs(
            identity=identity,
            kv=self._kv,
            can_group=can_group,
            device=device.told(),
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
