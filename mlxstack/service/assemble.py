"""Puts a service together from a preset and a home folder."""

from pathlib import Path

from mlxstack.core.preset import Persist, Preset
from mlxstack.engine.thread import Engine
from mlxstack.service.library import Library
from mlxstack.service.outbox import Outbox
from mlxstack.service.service import Service
from mlxstack.store.history import AgentFolders
from mlxstack.store.shelf import SlotShelf
from mlxstack.store.vault import DiskVault


def assemble(preset: Preset, home: Path) -> Service:
    """A service that is not started yet. Raises SetupError when a folder cannot be made."""
    outbox = Outbox()
    vault = DiskVault(home / "kv")
    shelf = SlotShelf(slots_folder(preset, home))
    is_writing = preset.agents.persist is not Persist.NEVER
    library = Library(AgentFolders(home / "agents"), is_writing=is_writing)
    engine = Engine(preset, vault, shelf, outbox.deliver, manifests=library)
    return Service(preset, outbox, engine, library)


def slots_folder(preset: Preset, home: Path) -> Path:
    """Where slot files go: the preset's own folder, or one under the home."""
    if preset.slots.save_path is not None:
        return Path(preset.slots.save_path).expanduser()
    return home / "slots" / (preset.name or "default")
