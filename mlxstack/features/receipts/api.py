"""Receipts of turns, for status lines of clients and `mlx-stack why`."""

from typing import Annotated

from litestar import get
from litestar.params import FromPath, FromQuery
from msgspec import Meta

from mlxstack.api.guards import OF_ALL, UNLOADED
from mlxstack.api.run_generation import TheService
from mlxstack.core.errors import NotFound
from mlxstack.core.status import RequestView
from mlxstack.features.receipts.policy import Receipt, main_turn, receipt_of

Width = Annotated[int, Meta(ge=1, le=1000)]
WIDTH = 200


@get("/receipts", opt={**OF_ALL, **UNLOADED})
async def show_last_receipt(service: TheService, width: FromQuery[Width] = WIDTH) -> Receipt:
    """Receipt of the last turn of any agent, in `width` cells."""
    views = [view for view in service.request_log.requests() if view.agent is not None]
    return _receipt(main_turn(views), "no agent has had a turn yet", width)


@get("/receipts/{name:str}", opt={**OF_ALL, **UNLOADED})
async def show_receipt(
    service: TheService, name: FromPath[str], width: FromQuery[Width] = WIDTH
) -> Receipt:
    """Receipt of a request, or of an agent's or session's last turn."""
    log = service.request_log
    view = log.find(name) or main_turn(log.of_session(name))
    return _receipt(view, f"no recent request, agent or session is called {name}", width)


def _receipt(view: RequestView | None, trouble: str, width: int) -> Receipt:
    if view is None:
        raise NotFound(trouble)
    return receipt_of(view, width)
