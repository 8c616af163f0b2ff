"""Resolves a model argument to a preset, listed or derived."""

import os
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from mlxstack.config import overrides, presets
from mlxstack.config.preset_paths import expanded
from mlxstack.control.launch import DerivedFile, LaunchRequest
from mlxstack.core.errors import SetupError, Taken
from mlxstack.host import services
from mlxstack.host.home import Home, make_private
from mlxstack.host.memory_budget import MemoryBudget, this_memory
from mlxstack.host.service_state import write_atomic
from mlxstack.models import reference as model_reference
from mlxstack.models.model_files import read_config
from mlxstack.models.reference import ReferenceKind
from mlxstack.planner import candidate as plan_candidate
from mlxstack.planner import derived_preset
from mlxstack.planner.candidate import Candidate
from mlxstack.planner.derived_preset import DerivedPreset
from mlxstack.planner.memory_check import MemoryRoom, room_in
from mlxstack.policy.memory.capacity_advice import SlotSizes

HEADER = (
    "# Derived from {id} for this machine. `mlx-stack presets new NAME --from {id}` keeps it.\n"
)
SIZE_KEYS = {"slots.count": "n_slots", "slots.n_ctx": "n_ctx", "kv.bits": "bits"}


class ModelRequest(Struct, frozen=True):
    """Preset by name or path with `--set` texts.

    Of a derived preset, `derived` tells the origin and `file` the text.
    """

    preset: str
    sets: tuple[str, ...]
    derived: DerivedPreset | None = None
    file: DerivedFile | None = None

    @property
    def launch(self) -> LaunchRequest:
        """Start request from the current folder."""
        return LaunchRequest(self.preset, self.sets, Path.cwd(), self.file)


class WrittenPreset(Struct, frozen=True):
    """File of a preset; `derived` where it was derived from a model."""

    path: Path
    derived: DerivedPreset | None = None


def request_for(
    wanted: str, home: Home, given: SlotSizes, sets: tuple[str, ...] = ()
) -> ModelRequest:
    """Preset for a name; models get a derived one.

    It is written when it starts, and has the name of its service: two models of one name have a
    file each. A model that runs already under its name keeps its preset. Raises SetupError.
    """
    reference = model_reference.resolve(wanted, home)
    if reference.kind is ReferenceKind.PRESET:
        return ModelRequest(presets.from_anywhere(reference.id), (*_as_sets(given), *sets))
    name = _name_in(sets) or reference.name
    path = home.derived_presets / f"{name}.yaml"
    is_found = presets.listed(home).get(name, path) == path
    preset = name if is_found else str(path)
    running = services.served(home).get(name)
    if path.is_file() and running is not None and running.model.id == reference.id:
        # A restart reads the file.
        return ModelRequest(preset, (*_as_sets(given), *sets))
    room = room_in(home, this_memory(os.environ), name)
    derived = derived_preset.derive(reference, home, room, given)
    derived = replace(derived, preset=replace(derived.preset, name=name))
    text = HEADER.format(id=reference.id) + derived_preset.text_of(derived)
    return ModelRequest(preset, sets, derived, DerivedFile(path, text))


def write_preset(name: str, source: str, home: Home, given: SlotSizes) -> WrittenPreset:
    """Write a user's preset. Raises SetupError, Taken if it exists."""
    path = home.presets / f"{name}.yaml"
    if not presets.NAME.fullmatch(name):
        raise SetupError(f"`{name}` cannot be the name of a preset; use letters, digits, dashes")
    if path.exists():
        raise Taken(f"{path} exists already; remove it, or choose another name")
    reference = model_reference.resolve(source, home)
    if reference.kind is ReferenceKind.PRESET:
        presets.load(reference.id, home, map(overrides.from_option, _as_sets(given)))
        make_private(path.parent)
        lines = [f"extends: {presets.from_anywhere(reference.id)}", f"name: {name}"]
        lines += [f"{key}: {value}" for key, value in _sections(given)]
        write_atomic(path, "\n".join([*lines, ""]).encode())
        return WrittenPreset(path)
    room = room_in(home, this_memory(os.environ), name)
    derived = derived_preset.derive(replace(reference, name=name), home, room, given)
    presets.overridden(derived.preset, (), home)
    make_private(path.parent)
    write_atomic(path, derived_preset.text_of(derived).encode())
    return WrittenPreset(path, derived)


def candidate_for(
    wanted: str, home: Home, memory: MemoryBudget, sets: tuple[str, ...] = ()
) -> Candidate:
    """Planner input of a preset, model or config. Raises SetupError."""
    over = [*overrides.from_environment(os.environ), *map(overrides.from_option, sets)]
    file = expanded(wanted)
    if file.suffix == ".json" and file.is_file():
        files = read_config(file)
        alone = plan_candidate.alone(file.absolute())
        return plan_candidate.of_files(presets.overridden(alone, over, home), files)
    reference = model_reference.resolve(wanted, home)
    if reference.kind is ReferenceKind.PRESET:
        return plan_candidate.of_preset(presets.load(reference.id, home, over).preset)
    derived = derived_preset.derive(reference, home, MemoryRoom(memory, ()), SlotSizes())
    changed = presets.overridden(derived.preset, over, home)
    return plan_candidate.of_files(changed, derived.candidate.files)


def _name_in(sets: tuple[str, ...]) -> str | None:
    """Valid service name that variables or options give."""
    over = [*overrides.from_environment(os.environ), *map(overrides.from_option, sets)]
    names = [one.raw for one in over if one.keys == ("name",)]
    return names[-1] if names and presets.NAME.fullmatch(names[-1]) else None


def _sections(given: SlotSizes) -> list[tuple[str, str]]:
    slots = {"count": given.n_slots, "n_ctx": given.n_ctx}
    sizes = ", ".join(f"{key}: {value}" for key, value in slots.items() if value is not None)
    found = [("slots", f"{{{sizes}}}")] if sizes else []
    return [*found, ("kv", f"{{bits: {given.bits}}}")] if given.bits is not None else found


def _as_sets(given: SlotSizes) -> tuple[str, ...]:
    pairs = ((key, getattr(given, field)) for key, field in SIZE_KEYS.items())
    return tuple(f"{key}={value}" for key, value in pairs if value is not None)
