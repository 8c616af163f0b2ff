"""`presets`: what can be started, and when to use it."""

import os

import typer

from mlxstack.cli.show import as_json, note, table
from mlxstack.cli.up import Json


def presets(json: Json = False) -> None:
    """List the presets: your own and the builtin ones."""
    from mlxstack.cli.catalog import catalog
    from mlxstack.host.paths import home_from

    shelf = catalog(home_from(os.environ))
    if json:
        as_json({"presets": shelf})
        return
    good = [one for one in shelf if one.error is None]
    rows = [
        (one.name, f"{one.n_slots} x {one.n_ctx}", one.kv_bits, one.modalities, one.when_to_use)
        for one in good
    ]
    table(("PRESET", "SLOTS x CTX", "KV BITS", "MODALITIES", "WHEN TO USE"), rows)
    for one in shelf:
        if one.error is not None:
            note(f"warning: {one.error}")
    typer.echo("\nmlx-stack up PRESET starts one; --dry-run shows everything in it")
