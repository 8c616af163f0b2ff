"""Service assembly, and engines and presets for a model swap."""

import logging
import os
import re
import reprlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.config import modes, presets
from mlxstack.config import preset_reflection as preset_schema
from mlxstack.config.presets import BUILTIN_MODEL
from mlxstack.core.errors import BadRequest, SetupError
from mlxstack.core.interfaces import EngineStores
from mlxstack.core.preset import ModelSpec, Persist, Preset, ServiceKind
from mlxstack.engine import device
from mlxstack.engine.chat_engine import ChatEngine
from mlxstack.engine.embedding_engine import EmbeddingEngine
from mlxstack.engine.loading import loader
from mlxstack.engine.template_check import check_template
from mlxstack.features.drafts.engine.draft_loading import locate_drafts
from mlxstack.features.ranks.group import RankGroup
from mlxstack.features.ranks.parts import RankedParts
from mlxstack.features.remote_kv.peers import Peers
from mlxstack.host.hardware import this_memory
from mlxstack.host.home import Home
from mlxstack.models.model_files import read_config
from mlxstack.models.reference import HUB_ID
from mlxstack.planner.candidate import of_files
from mlxstack.planner.fit import refuse_if_too_big
from mlxstack.planner.memory_room import room_in
from mlxstack.service.parts.agent_store import AgentStore
from mlxstack.service.parts.request_stream import EventDispatcher
from mlxstack.store import slot_folder_registry
from mlxstack.store.agent_history import AgentFolders
from mlxstack.store.check_files import CheckFiles
from mlxstack.store.disk_quota import QuotaKVStore
from mlxstack.store.files import Disk, write_atomic
from mlxstack.store.kv_store import DiskKVStore
from mlxstack.store.slot_files import SlotFileFolder
from mlxstack.store.write_counter import CountedDisk, WriteCounter, WriteKind

log = logging.getLogger("mlxstack.swap")

MAX_NAME = 64
HANDOVER_ID = re.compile(r"[0-9a-f]{32}")


class CheckedModel(Struct, frozen=True):
    """Model on disk: folder and bytes of weights, 0 if unknown."""

    path: str
    n_bytes: int


@dataclass
class EngineFactory:
    """Factory of engines over the stores of one home.

    `source` is the file from which the worker restarts; the running preset is written there.
    """

    home: Path
    store: DiskKVStore
    dispatcher: EventDispatcher
    agent_store: AgentStore
    peers: Peers
    counter: WriteCounter
    source: Path | None = None
    ranks: RankGroup | None = None

    def engine(self, preset: Preset) -> ChatEngine | EmbeddingEngine:
        """New engine, not started. Raises SetupError when a folder cannot be made."""
        if preset.kind is ServiceKind.EMBEDDING:
            return EmbeddingEngine(preset)
        is_writing = preset.agents.persist is not Persist.NEVER
        self.agent_store.serve(preset.model.served_name, is_writing=is_writing)
        disk = preset.prefix_cache.disk
        self.counter.max_bytes = disk.daily_write_bytes
        counted_disk = CountedDisk(self.counter, WriteKind.KV)
        slot_files = SlotFileFolder(slots_folder(preset, self.home), counted_disk)
        slot_folder_registry.note(self.store.root, slot_files.directory)
        store = QuotaKVStore(self.store, AgentFolders(self.home / "agents"), disk)
        return ChatEngine(
            preset,
            EngineStores(store, slot_files, self.agent_store, CheckFiles(self.home / "checks")),
            self.dispatcher.deliver,
            parts=RankedParts(self.ranks) if self.ranks is not None else None,
            remote=self.peers if preset.server.peers else None,
        )

    def preset(self, name: str, running: Preset) -> Preset:
        """Listed preset of this name, with the server settings of `running`.

        Raises BadRequest for a path, for an unknown name, and for a file that is no valid preset
        for chat. The refusal quotes nothing of the file: a client may not read it.
        """
        home = Home(self.home)
        listed = presets.listed(home)
        if name not in listed or presets.is_path(name):
            raise BadRequest(
                f"no preset is called `{reprlib.repr(name)[1:-1]}`; a client can only name a "
                "preset "
                "that `mlx-stack presets` lists, not a file"
                f"{preset_schema.suggestion(name[:MAX_NAME], listed)}",
                "preset",
            )
        try:
            loaded = presets.load(name, home).preset
        except SetupError as error:
            log.warning("the preset %s cannot be loaded: %s", name, error.message)
            raise BadRequest(
                f"the file of the preset {name!r} is not valid; the service's log and "
                f"`mlx-stack presets show {name}` say why",
                "preset",
            ) from error
        return _served_like(loaded, running)

    def handover(self, handover_id: str, running: Preset) -> Preset:
        """Resolved preset that a command left in the home for the service.

        Raises BadRequest when there is none, or when it is not for chat.
        """
        if not HANDOVER_ID.fullmatch(handover_id):
            raise BadRequest("handover is not an id that `mlx-stack swap` makes", "handover")
        try:
            loaded = presets.read_resolved(Home(self.home).handover_file(handover_id))
        except SetupError as error:
            raise BadRequest(
                "the service does not find the preset that `mlx-stack swap` wrote for it, since "
                "it has another home (MLX_STACK_HOME) or runs on another machine; put the file "
                "into the folder `presets` of that home and give its name",
                "handover",
            ) from error
        return _served_like(loaded, running)

    def with_model(self, model: str, running: Preset) -> Preset:
        """The running preset with another model of the hub.

        It may name its own model again. Raises BadRequest for a folder: a client chooses no files
        of this machine.
        """
        if model not in {running.model.id, BUILTIN_MODEL}:
            _refuse_folder(model)
        return replace(running, model=ModelSpec(id=model))

    def check(self, preset: Preset) -> CheckedModel:
        """Download a model and what drafts for it; check files, memory, template.

        Raises SetupError.
        """
        if self.ranks is not None or preset.hosts:
            raise SetupError(
                "the model of a service with `hosts` is not changed while it runs; stop it, and "
                "start another preset"
            )
        path = loader.locate(preset.model)
        locate_drafts(preset.model)
        files = read_config(path)
        if files.weights is None:
            raise SetupError(f"the model {preset.model.id} at {path} has no complete weights")
        memory = this_memory(os.environ)
        candidate = of_files(preset, files)
        refuse_if_too_big(candidate, room_in(Home(self.home), memory), option="")
        check_template(path)
        return CheckedModel(str(path), candidate.weights.n_bytes(memory.half_bytes))

    def mode(self, service: str) -> str:
        """Mode of this computer, if this service belongs to it; else ""."""
        active = modes.active(Home(self.home))
        if active is not None and service in active.services:
            return active.name
        return ""

    def keep(self, preset: Preset) -> None:
        """Write the preset that a restarted worker serves."""
        if self.source is not None:
            write_atomic(self.source, [msgspec.json.encode(preset)], Disk())

    def active_bytes(self) -> int:
        """Bytes that MLX holds now."""
        return device.active_bytes()


def _served_like(preset: Preset, running: Preset) -> Preset:
    if preset.kind is not ServiceKind.CHAT:
        raise BadRequest(f"the preset {preset.name} is not a chat model", "preset")
    return replace(preset, server=running.server)


def _refuse_folder(model: str) -> None:
    # A hub id that is also a folder below the current one would be loaded from there.
    if not HUB_ID.fullmatch(model) or Path(model).exists():
        raise BadRequest(
            f"the model {reprlib.repr(model)} is not the id of a repository on the hub; a client "
            "cannot choose a folder. Write a preset with this `model.id` into the folder "
            "`presets` of the service's home and give its name",
            "model",
        )


def slots_folder(preset: Preset, home: Path) -> Path:
    """Folder of slot files: the preset's own, or one under the home."""
    if preset.slots.save_path is not None:
        return Path(preset.slots.save_path).expanduser()
    return home / "slots" / (preset.name or "default")
