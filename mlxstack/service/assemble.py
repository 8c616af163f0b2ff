"""Puts a service together from a preset and a home folder."""

from pathlib import Path

from mlxstack.core.preset import Preset
from mlxstack.service.agents.store import AgentStore
from mlxstack.service.engine_factory import EngineFactory
from mlxstack.service.event_dispatcher import EventDispatcher
from mlxstack.service.service import Service
from mlxstack.store.agent_history import AgentFolders
from mlxstack.store.agent_locks import AgentLockFiles
from mlxstack.store.kv_store import DiskKVStore


def assemble(preset: Preset, home: Path, source: Path | None = None) -> Service:
    """A service that is not started yet; `source` is the file of its resolved preset, if any.

    Raises SetupError when a folder cannot be made.
    """
    folders = AgentFolders(home / "agents")
    dispatcher, agent_store = EventDispatcher(), AgentStore(folders, AgentLockFiles(home / "locks"))
    engine_factory = EngineFactory(home, DiskKVStore(home / "kv"), dispatcher, agent_store, source)
    return Service(preset, dispatcher, engine_factory.engine(preset), agent_store, engine_factory)
