"""Where engines and presets come from: what a service needs to change its model."""

import logging
import os
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.errors import BadRequest, SetupError
from mlxstack.core.preset import Kind, ModelSpec, Persist, Preset
from mlxstack.engine import footprint, loader
from mlxstack.engine.embed import Embedder
from mlxstack.engine.template_check import check_template
from mlxstack.engine.thread import Engine
from mlxstack.host import modes, presets
from mlxstack.host.memory import this_memory
from mlxstack.host.models import read_config
from mlxstack.host.paths import Home
from mlxstack.service.candidate import Candidate
from mlxstack.service.fit import refuse_if_too_big, room_in
from mlxstack.service.library import Library
from mlxstack.service.outbox import Outbox
from mlxstack.store import shelves
from mlxstack.store.bounded import BoundedVault
from mlxstack.store.disk import Disk
from mlxstack.store.durable import write_durably
from mlxstack.store.history import AgentFolders
from mlxstack.store.shelf import SlotShelf
from mlxstack.store.vault import DiskVault

log = logging.getLogger("mlxstack.swap")


class Checked(Struct, frozen=True):
    """A model that is here: its folder, and the bytes of its weights in memory, 0 if unknown."""

    path: str
    n_bytes: int


class Supply:
    """`source` is the file from which the worker is started again; what runs is written there."""

    def __init__(
        self, home: Path, vault: DiskVault, outbox: Outbox, library: Library, source: Path | None
    ) -> None:
        self._home = home
        self._vault = vault
        self._outbox = outbox
        self._library = library
        self._source = source

    def engine(self, preset: Preset) -> Engine | Embedder:
        """An engine that is not started. Raises SetupError when a folder cannot be made."""
        if preset.kind is Kind.EMBEDDING:
            return Embedder(preset, self._outbox.deliver)
        self._library.is_writing = preset.agents.persist is not Persist.NEVER
        shelf = SlotShelf(slots_folder(preset, self._home))
        shelves.note(self._vault.root, shelf.directory)
        vault = BoundedVault(
            self._vault, AgentFolders(self._home / "agents"), preset.prefix_cache.disk
        )
        return Engine(
            preset,
            vault,
            shelf,
            self._outbox.deliver,
            memory_bytes=this_memory(os.environ).total,
            manifests=self._library,
        )

    def preset(self, wanted: str, running: Preset) -> Preset:
        """The preset of this name or path, to be served where `running` is.

        Raises BadRequest when there is none, or when it is not for chat.
        """
        try:
            found = presets.load(wanted, Home(self._home)).preset
        except SetupError as error:
            raise BadRequest(error.message, "preset") from error
        if found.kind is not Kind.CHAT:
            raise BadRequest(f"the preset {wanted} is no chat model", "preset")
        return replace(found, server=running.server)

    def with_model(self, model: str, running: Preset) -> Preset:
        """The preset that runs, with another model."""
        return replace(running, model=ModelSpec(id=model))

    def check(self, preset: Preset) -> Checked:
        """Fetch what is not here yet; check that it is whole, fits, and has a template that ends.

        Raises SetupError.
        """
        path = loader.locate(preset.model)
        files = read_config(path)
        if files.weights is None:
            raise SetupError(f"the model {preset.model.id} at {path} has no complete weights")
        memory = this_memory(os.environ)
        found = Candidate(preset, files, files.weights, is_measured=True)
        refuse_if_too_big(found, room_in(Home(self._home), memory), option="")
        check_template(path)
        return Checked(str(path), files.weights.n_bytes(memory.half_bytes))

    def mode(self, service: str) -> str:
        """The mode that this computer was switched to, if this service belongs to it; else ""."""
        active = modes.active(Home(self._home))
        return active.name if active is not None and service in active.services else ""

    def keep(self, preset: Preset) -> None:
        """A worker that is started again serves this preset."""
        if self._source is not None:
            write_durably(self._source, [msgspec.json.encode(preset)], Disk())

    def active_bytes(self) -> int:
        """What MLX holds in memory now."""
        return footprint.active_bytes()


def slots_folder(preset: Preset, home: Path) -> Path:
    """Where slot files go: the preset's own folder, or one under the home."""
    if preset.slots.save_path is not None:
        return Path(preset.slots.save_path).expanduser()
    return home / "slots" / (preset.name or "default")
