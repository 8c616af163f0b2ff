"""`why`: the receipt of an agent's last turn, in one line."""

from typing import TYPE_CHECKING, Annotated

import typer

from mlxstack.cli.service_request import ServiceOptions, path_of
from mlxstack.cli.verbs import VerbResult

if TYPE_CHECKING:
    from mlxstack.features.receipts.policy import Receipt

Agent = Annotated[
    str | None, typer.Argument(help="An agent, a request or a session; the last one without.")
]


def why(service: ServiceOptions, agent: Agent = None) -> VerbResult:
    """Show in one line what a turn reused, computed and waited for.

    Nothing where no service answers; `cache why` has all phases.
    """
    from mlxstack.client.errors import Unreachable

    try:
        receipt = _receipt(service, agent)
    except Unreachable:
        return VerbResult(None, "")
    return VerbResult(receipt, receipt.line)


def _receipt(service: ServiceOptions, agent: str | None) -> "Receipt":
    import os

    from mlxstack.features.receipts.policy import Receipt
    from mlxstack.features.receipts.receipt_line import terminal_width

    path = path_of("receipts", *([agent] if agent else []))
    path += f"?width={terminal_width(os.environ)}"
    return service.ask(lambda client: client.get(path, Receipt))
