"""Puts a service together from a preset and a home folder."""

from pathlib import Path

from mlxstack.core.preset import Preset
from mlxstack.service.library import AgentStore
from mlxstack.service.outbox import EventDispatcher
from mlxstack.service.service import Service
from mlxstack.service.supply import EngineFactory
from mlxstack.store.agent_locks import AgentLocks
from mlxstack.store.history import AgentFolders
from mlxstack.store.vault import DiskKVStore


def assemble(preset: Preset, home: Path, source: Path | None = None) -> Service:
    """A service that is not started yet; `source` is the file of its resolved preset, if any.

    Raises SetupError when a folder cannot be made.
    """
    folders = AgentFolders(home / "agents")
    outbox, library = EventDispatcher(), AgentStore(folders, AgentLocks(home / "locks"))
    supply = EngineFactory(home, DiskKVStore(home / "kv"), outbox, library, source)
    return Service(preset, outbox, supply.engine(preset), library, supply)
