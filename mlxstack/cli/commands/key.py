"""`key`: create an API key and its entry of a preset."""

from typing import Annotated

import typer

from mlxstack.cli.completion import tier_names
from mlxstack.cli.exit_codes import Misuse
from mlxstack.cli.output import note, say
from mlxstack.cli.streams import finishes
from mlxstack.cli.verbs import VerbResult

Tier = Annotated[
    str,
    typer.Option(
        "--tier", help="Priority of its requests: high, normal or low.", autocompletion=tier_names
    ),
]
Salt = Annotated[
    str, typer.Option("--salt", help="Separates its KV cache from that of other keys.")
]
N_BYTES = 24


@finishes()
def key(tier: Tier = "normal", salt: Salt = "") -> VerbResult:
    """Create an API key. Only its hash goes into the preset; store the key itself."""
    import secrets

    from mlxstack.api.api_keys import as_key
    from mlxstack.core import preset

    tiers = tier_names()
    if tier not in tiers:
        raise Misuse(f"there is no tier {tier!r}; known are {', '.join(tiers)}")
    secret = f"mlxs-{secrets.token_urlsafe(N_BYTES)}"
    held = as_key(preset.ApiKey(secret, preset.Tier(tier), salt))

    def show() -> None:
        note("the key, shown only now:")
        say(secret)
        note("for the preset, under server.api_keys:")
        more = ""
        if salt:
            more = f", salt: {salt!r}"
        note(f"  - {{key: '{held.key}', tier: {tier}{more}}}")

    return VerbResult(
        {"key": secret, "preset": {"key": held.key, "tier": tier, "salt": salt}}, show
    )
