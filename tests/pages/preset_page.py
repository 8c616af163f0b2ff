"""The page docs/presets.md, drawn from the structs, the shipped files and the planner."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec.inspect as mi
import msgspec.json
from msgspec.structs import replace

from mlxstack.cli.units import size
from mlxstack.config import presets
from mlxstack.config.preset_reflection import PRESET, bare, meaning, short_form
from mlxstack.config.presets import BUILTIN_MODEL
from mlxstack.core.formatting import tokens
from mlxstack.core.preset import Preset, ServiceKind
from mlxstack.host.hardware import MemoryBudget, mac_memory
from mlxstack.host.home import Home
from mlxstack.models import model_files
from mlxstack.models.model_files import ModelFiles
from mlxstack.planner.candidate import Candidate, excerpts
from mlxstack.policy.memory.capacity import disk_bytes, need
from tests.pages import more_shapes

MACS_GB = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)
DISK_TOKENS = 50_000
HEADS = ("key", "what may stand there", "default", "meaning")

ABOUT = Path(__file__).with_name("preset_about.md").read_text(encoding="utf-8")

SHIPPED = Path(__file__).with_name("preset_shipped.md").read_text(encoding="utf-8")

KEYS = """\
## Every key

`null` is an absent value. Lists of sections are written `key[]`.
"""


def page() -> str:
    """The whole page."""
    with TemporaryDirectory() as folder:
        home = Home(Path(folder))
        shelf = {name: presets.load(name, home).preset for name in presets.listed(home)}
    uses = _table(
        ("preset", "when to use"),
        ((f"`{name}`", preset.description) for name, preset in shelf.items()),
    )
    numbers = _table(
        ("preset", "model", "slots x context", "KV bits", "weights", "KV a token", "windows",
         "all slots", "from", "disk"),
        map(_numbers, more_shapes.candidates([(p, files_of(p)) for p in shelf.values()])),
    )  # fmt: skip
    shipped = SHIPPED.format(uses=uses, numbers=numbers, n_disk=DISK_TOKENS)
    return "\n".join([ABOUT, shipped, KEYS, *_sections()])


def _numbers(candidate: Candidate) -> tuple[str, ...]:
    preset = candidate.preset
    mac = smallest_mac(candidate)
    load = candidate.load(mac)
    total = need(load).total
    embeds = preset.kind is ServiceKind.EMBEDDING
    return (
        f"`{preset.name}`",
        f"`{preset.model.id}`",
        f"{preset.slots.count} x {tokens(preset.slots.n_ctx)}",
        str(preset.kv.bits),
        size(load.weights),
        "-" if embeds else size(load.geometry.growth),
        size(load.geometry.state_bytes(1 << 30)),
        size(total),
        mac.owner.removeprefix("a Mac with "),
        "-" if embeds else size(disk_bytes(load.geometry, DISK_TOKENS)),
    )


def smallest_mac(*candidates: Candidate) -> MemoryBudget:
    """The memory of the smallest Mac whose GPU holds these services at once."""
    macs = (mac_memory(f"{gb} GB") for gb in MACS_GB)
    return next(
        memory
        for memory in macs
        if sum(need(candidate.load(memory)).total for candidate in candidates) <= memory.usable
    )


def files_of(preset: Preset) -> ModelFiles:
    """From the excerpts even where the model was downloaded, so that the page is the same.

    Raises LookupError with the file to write and the command to run.
    """
    if preset.model.id == BUILTIN_MODEL:
        return model_files.find_model(preset.model, excerpts())
    for file in excerpts().glob("*.json"):
        files = model_files.read_config(file)
        if files.config["excerpt_of"] == preset.model.id:
            return replace(files, weights=None)
    raise LookupError(
        f"there is no excerpt of the config of {preset.model.id}: "
        f"put the config into presets/configs/{preset.name}.json, then `make docs`"
    )


def keys_in(shape: mi.Type = PRESET, before: str = "") -> Iterator[tuple[str, mi.Field]]:
    """Every key with a value: dotted path, allowed values.

    `[]` stands for each item of a list of sections, `NAME` for each name of a table of them.
    """
    kinds = shape.types if isinstance(shape, mi.UnionType) else (shape,)
    for section in (kind for kind in kinds if isinstance(kind, mi.StructType)):
        for field in section.fields:
            path = f"{before}{field.encode_name}"
            below = bare(field.type)
            if not isinstance(below, mi.StructType):
                yield path, field
            if isinstance(below, mi.VarTupleType):
                path = f"{path}[]"
                below = below.item_type
            elif isinstance(below, mi.DictType):
                path = f"{path}.NAME"
                below = below.value_type
            yield from keys_in(below, f"{path}.")


def description(field: mi.Field) -> str:
    """Description of a key, one sentence."""
    shape = field.type
    schema = shape.extra_json_schema if isinstance(shape, mi.Metadata) else None
    return str((schema or {}).get("description", ""))


def _sections() -> Iterator[str]:
    rows = [_key(path, field) for path, field in keys_in()]
    alone = [row for row in rows if "." not in row[0]]
    yield _table(HEADS, alone) + "\n"
    inside = (row for row in rows if "." in row[0])
    for name, in_section in groupby(inside, key=lambda row: row[0].partition(".")[0].strip("`")):
        yield f"### {name}\n\n{_table(HEADS, in_section)}\n"


def _key(path: str, field: mi.Field) -> tuple[str, str, str, str]:
    default: Any = field.default
    if field.default_factory is not mi.NODEFAULT:
        default = field.default_factory()
    default_text = (
        "needed" if default is mi.NODEFAULT else f"`{msgspec.json.encode(default).decode()}`"
    )
    held = bare(field.type)
    item = held.item_type if isinstance(held, mi.VarTupleType) else None
    kind = "a list of sections" if isinstance(item, mi.StructType) else meaning(held)
    short = short_form(path.rpartition(".")[2])
    kind += f", such as `{short.example}`" if short is not None else ""
    return f"`{path}`", kind, default_text, description(field)


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
