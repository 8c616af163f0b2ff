"""Assembly of a service from a preset and a home."""

from pathlib import Path

from mlxstack.core.preset import Preset
from mlxstack.features.early_turns.service import EarlyTurns
from mlxstack.features.heads.service import ClientHeads
from mlxstack.features.heads.store import HeadStore
from mlxstack.features.loops.service import CallNotes
from mlxstack.features.ranks.group import RankGroup
from mlxstack.features.remote_kv.peers import Peers
from mlxstack.features.thinking.service import ThinkingDefaults
from mlxstack.features.turn_kinds.service import TurnKinds
from mlxstack.features.usage.service import Usage
from mlxstack.host.home import Home
from mlxstack.service.engine_factory import EngineFactory
from mlxstack.service.parts.agent_store import AgentStore
from mlxstack.service.parts.neighbors import Neighbors
from mlxstack.service.parts.request_stream import EventDispatcher
from mlxstack.service.parts.service_feature import ServiceFeature
from mlxstack.service.parts.stored_messages import MessageReader
from mlxstack.service.service import Service
from mlxstack.store.agent_history import AgentFolders, AgentLockFiles
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.store.write_counter import CountedDisk, WriteCounter, WriteKind


def assemble(
    preset: Preset, home: Path, read_messages: MessageReader, source: Path | None = None
) -> Service:
    """Assemble an unstarted service; `source` is its resolved preset's file.

    `read_messages` reads the messages of a file. Raises SetupError when a folder cannot be made.
    """
    counter = WriteCounter(Home(home).writes_file)
    folders = AgentFolders(home / "agents", CountedDisk(counter, WriteKind.AGENTS))
    agent_store = AgentStore(folders, AgentLockFiles(home / "locks"))
    store = DiskKVStore(home / "kv", CountedDisk(counter, WriteKind.KV))
    engine_factory = EngineFactory(
        home=home,
        store=store,
        dispatcher=EventDispatcher(),
        agent_store=agent_store,
        peers=Peers(preset.server.peers, store),
        counter=counter,
        source=source,
        ranks=RankGroup(preset.hosts) if preset.hosts else None,
    )
    client_heads = ClientHeads(HeadStore(home / "heads"))
    features: list[ServiceFeature] = [
        engine_factory.peers,
        EarlyTurns(),
        TurnKinds(),
        ThinkingDefaults(),
        Usage(Home(home), counter),
        CallNotes(),
        client_heads,
    ]
    if source is not None:
        features.insert(0, Neighbors(home, source.stem))
    engine = engine_factory.engine(preset)
    service = Service(preset, engine_factory, engine, read_messages, tuple(features))
    client_heads.service = service
    return service
