"""All presets, with the errors of those that cannot be read."""

import os

import msgspec
from msgspec import Struct

from mlxstack.cli.verification.tools.kept_results import ToolSummary, summaries
from mlxstack.config import presets
from mlxstack.core.errors import SetupError
from mlxstack.core.preset import ServiceKind
from mlxstack.host.hardware import this_memory
from mlxstack.host.home import Home
from mlxstack.planner.ranking import preset_fits


class PresetListing(Struct, frozen=True):
    """Listed preset; with an `error` the rest is empty."""

    name: str
    source: str
    model: str = ""
    kind: str = ""
    modalities: str = ""
    n_slots: int = 0
    n_ctx: int = 0
    total_ctx: int = 0
    kv_bits: int = 0
    description: str = ""
    weights_bytes: int | None = None
    fits: bool | None = None
    is_downloaded: bool = False
    tools: ToolSummary | None = None
    """Last result of `verify --tools` on its model."""
    error: str | None = None
    refusal: str = ""
    """Reason why its model cannot be built here."""


def catalog(home: Home) -> list[PresetListing]:
    """The presets in alphabetical order, `demo` first."""
    paths = presets.listed(home)
    names = sorted(paths, key=lambda name: (name != "demo", name))
    return [_entry(name, str(paths[name]), home) for name in names]


def with_fits(listings: list[PresetListing], home: Home) -> list[PresetListing]:
    """Listings with size, fit, presence and tool calls of their models."""
    names = [listing.name for listing in listings if listing.error is None]
    by_model = summaries(home)
    fits = preset_fits(home, names, this_memory(os.environ))
    fitted = []
    for listing in listings:
        fit = fits.get(listing.name)
        if fit is None:
            fitted.append(listing)
        else:
            tools = by_model.get(listing.model) if listing.kind == ServiceKind.CHAT else None
            changes = {**msgspec.structs.asdict(fit), "tools": tools}
            fitted.append(msgspec.structs.replace(listing, **changes))
    return fitted


def _entry(name: str, source: str, home: Home) -> PresetListing:
    try:
        preset = presets.load(name, home).preset
    except SetupError as error:
        return PresetListing(name, source, error=error.message)
    return PresetListing(
        name=name,
        source=source,
        model=preset.model.id,
        kind=preset.kind,
        modalities="text",
        n_slots=preset.slots.count,
        n_ctx=preset.slots.n_ctx,
        total_ctx=preset.slots.count * preset.slots.n_ctx,
        kv_bits=preset.kv.bits,
        description=preset.description,
    )
