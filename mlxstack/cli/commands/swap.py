"""`swap`: change the model of a running service; requests wait."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from mlxstack.cli.output import say, table
from mlxstack.cli.service_request import ServiceOptions
from mlxstack.cli.streams import finishes
from mlxstack.cli.units import size
from mlxstack.cli.verbs import VerbResult

MAX_S = 7200.0
LOAD = "/v1/models/load"


@finishes()
def swap(
    preset: Annotated[str, typer.Argument(metavar="MODEL", help="What to serve next.")],
    service: ServiceOptions,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Only fetch and check it; the old model answers on.")
    ] = False,
    drain: Annotated[
        float,
        typer.Option(
            "--drain", min=0, max=MAX_S, help="Seconds that running requests may still take."
        ),
    ] = 30.0,
) -> VerbResult:
    """Change the model of a running service; requests wait.

    Steps: drain, park, unload, load, warm.
    """
    from mlxstack.cli.target import target
    from mlxstack.host.home import home_from

    with _chosen(preset, service.url) as chosen:
        body = {**chosen, "prepare": prepare, "drain_s": drain}
        where = target(home_from(os.environ), *service)
        report = where.ask(lambda client: client.post(LOAD, body), timeout_s=MAX_S)
    if prepare:
        place = f"{size(report['n_bytes'])} in {report['path']}"
        return VerbResult(report, f"{preset} is here and whole: {place}")
    return VerbResult(report, lambda: _show(report))


@contextmanager
def _chosen(preset: str, url: str | None) -> Iterator[dict[str, str]]:
    """Body field of a preset: its name, or a handover id.

    The service takes no path from a client, since any page or user of this machine can be one.
    A file in the home shows that the caller is its owner. Raises SetupError for an invalid file.
    """
    from secrets import token_hex

    from mlxstack.cli.plan_tables import show_reasons
    from mlxstack.config import presets
    from mlxstack.control.start import request_for
    from mlxstack.host.home import home_from, make_folder
    from mlxstack.host.services import write_json
    from mlxstack.models.reference import HUB_ID
    from mlxstack.policy.memory.capacity_advice import SlotSizes

    if url is not None and HUB_ID.fullmatch(preset):
        yield {"model": preset}
        return
    if url is not None and not presets.is_path(preset):
        # The service may have another home, whose presets it knows itself.
        yield {"preset": preset}
        return
    home = home_from(os.environ)
    request = request_for(preset, home, SlotSizes())
    if request.file is not None:
        show_reasons(request.file.preset)
        resolved = presets.load_text(request.file.text, request.file.path, home).preset
    elif presets.is_path(request.preset):
        resolved = presets.load(request.preset, home).preset
    else:
        yield {"preset": request.preset}
        return
    handover = token_hex(16)
    copy = home.handover_file(handover)
    make_folder(copy.parent)
    try:
        write_json(copy, resolved)
        yield {"handover": handover}
    finally:
        copy.unlink(missing_ok=True)


def _show(report: dict[str, Any]) -> None:
    rows = [(s["name"], f"{s['ms']:.1f}", s["n_bytes"], _what(s)) for s in report["steps"]]
    table(("STEP", "MS", "BYTES", "WHAT"), rows)
    held = report["active_bytes"]
    say(
        f"{report['before']} was changed for {report['model']}; "
        f"MLX held {size(held['after_unload'])} between them, "
        f"{size(held['before_load'])} before the first was loaded"
    )


def _what(step: dict[str, Any]) -> str:
    count = step["count"]
    return {
        "drain": f"{count} requests finished",
        "park": f"{count} contexts brought to disk",
        "unload": "memory given back",
        "load": "weights loaded",
        "warm": f"{count} prefixes computed",
    }.get(step["name"], "")
