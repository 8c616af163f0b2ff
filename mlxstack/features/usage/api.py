"""Route of usage."""

from litestar import get
from litestar.params import FromQuery

from mlxstack.api.guards import OF_ALL, UNLOADED
from mlxstack.api.run_generation import TheService
from mlxstack.core.errors import Unsupported
from mlxstack.core.usage import UsageReport
from mlxstack.core.usage_key import UsageKey
from mlxstack.features.usage.service import Usage


@get("/usage", opt={**OF_ALL, **UNLOADED})
async def show_usage(
    service: TheService,
    since: FromQuery[str] = "7d",
    by: FromQuery[UsageKey] = UsageKey.DAY,
    price: FromQuery[str | None] = None,
) -> UsageReport:
    """Tokens, seconds, bytes written and list price of the home."""
    usage = service.feature(Usage)
    if usage is None:
        raise Unsupported("this service counts no usage")
    return await usage.report(since, by, price)
