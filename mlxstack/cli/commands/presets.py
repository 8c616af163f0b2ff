"""`presets`: list, show and create presets."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.completion import preset_argument
from mlxstack.cli.output import as_json, note, say, table
from mlxstack.cli.start_choice import Ctx, KvBits, Set, Slots
from mlxstack.cli.streams import finishes
from mlxstack.cli.units import size
from mlxstack.cli.verbs import VerbApp, VerbResult
from mlxstack.core.formatting import tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlxstack.cli.preset_list import PresetListing
    from mlxstack.config.presets import LoadedPreset

DEFAULT = "default"
HEADS = ("PRESET", "SIZE", "FITS", "DOWNLOADED", "SLOTS x CTX", "KV BITS", "TOOLS", "WHEN TO USE")

app = VerbApp(help="List presets, show one, print their JSON schema.")


@app.without_verb
def presets(
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of preset files.")
    ] = False,
) -> VerbResult:
    """List the presets: your own and the builtin ones."""
    if not schema:
        return list_presets()
    from mlxstack.config.preset_reflection import json_schema

    document = json_schema()
    return VerbResult(document, lambda: as_json(document))


@app.command("show")
def show_preset(
    preset: Annotated[str, preset_argument("A preset's name, or a path to one.")], sets: Set = None
) -> VerbResult:
    """Show every value of a preset and its origin.

    An origin is a file with the line, a variable, an option or the default.
    """
    from pathlib import Path

    from mlxstack.control import start
    from mlxstack.host.home import home_from

    request = start.StartRequest(preset, tuple(sets or ()), Path.cwd())
    loaded = start.resolve(request, home_from(os.environ))
    return VerbResult(loaded, lambda: table(("KEY", "VALUE", "FROM"), _rows(loaded)))


@app.command("new")
@finishes()
def new_preset(
    name: Annotated[str, typer.Argument(help="The name of the new preset.")],
    source: Annotated[str, typer.Option("--from", metavar="MODEL", help="What it serves.")],
    ctx: Ctx = None,
    slots: Slots = None,
    kv_bits: KvBits = None,
) -> VerbResult:
    """Write a preset of your own, with the settings that `up` would choose."""
    from mlxstack.cli.plan_tables import show_reasons
    from mlxstack.host.home import home_from
    from mlxstack.planner.derived_preset import write_preset
    from mlxstack.policy.memory.capacity_advice import SlotSizes

    written = write_preset(name, source, home_from(os.environ), SlotSizes(slots, ctx, kv_bits))

    def show() -> None:
        if written.derived is not None:
            show_reasons(written.derived)
        say(f"{written.path} is written; `mlx-stack up {name}` starts it")

    return VerbResult({"preset": name, "path": written.path}, show)


@app.command("rm")
@finishes()
def remove_preset(name: Annotated[str, preset_argument("Its name.")]) -> VerbResult:
    """Delete a preset of your own, or one that `up` derived.

    The model's files stay.
    """
    from mlxstack.config.presets import delete
    from mlxstack.core.errors import Taken
    from mlxstack.host import services
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    if any(state.spec.name == name for state in services.running(home)):
        raise Taken(f"{name} is running; `mlx-stack down {name}` stops it first")
    path = delete(name, home)
    return VerbResult({"preset": name, "path": path}, f"{path} is deleted")


@app.command("list")
def list_presets() -> VerbResult:
    """List the presets, as without a verb."""
    from mlxstack.cli.preset_list import catalog, with_fits
    from mlxstack.host.home import home_from

    home = home_from(os.environ)
    listings = with_fits(catalog(home), home)
    return VerbResult({"presets": listings}, lambda: _show(listings))


def _show(listings: "Sequence[PresetListing]") -> None:
    rows = [
        (
            listing.name,
            "unknown" if listing.weights_bytes is None else size(listing.weights_bytes),
            {True: "yes", False: "no", None: "-"}[listing.fits],
            "yes" if listing.is_downloaded else "no",
            f"{listing.n_slots} x {tokens(listing.n_ctx)}",
            listing.kv_bits,
            listing.tools or "",
            listing.description,
        )
        for listing in listings
        if listing.error is None
    ]
    table(HEADS, rows, ("WHEN TO USE", "KV BITS", "TOOLS"))
    for listing in listings:
        if listing.error is not None:
            note(f"warning: {listing.error}")
        if listing.refusal:
            note(f"{listing.name}: {listing.refusal}", is_dim=True)
    say("\nmlx-stack up PRESET starts one; mlx-stack presets show PRESET shows all of it")


def _rows(loaded: "LoadedPreset") -> list[tuple[object, ...]]:
    import msgspec

    from mlxstack.config.preset_reflection import leaves

    values = msgspec.to_builtins(loaded.preset)
    rows: list[tuple[object, ...]] = []
    for keys in leaves():
        value = values
        for key in keys:
            value = value[key]
        name = ".".join(keys)
        rows.append((name, _value_text(value), _origin(loaded.origins, name)))
    return rows


def _value_text(value: object) -> str:
    import json

    if isinstance(value, str) and value:
        return value
    return json.dumps(value)


def _origin(origins: dict[str, str], name: str) -> str:
    """Source of a value, or of the first value inside it."""
    within = (origin for key, origin in origins.items() if key.startswith((f"{name}.", f"{name}[")))
    return origins.get(name) or next(within, DEFAULT)
