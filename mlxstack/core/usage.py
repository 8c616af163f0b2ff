"""Usage of a home: sums of finished requests, and their list price."""

from msgspec import Struct

from mlxstack.core.usage_key import UsageKey


class UsageSums(Struct, frozen=True):
    """Sums over finished requests, as `/requests` lists them."""

    key: str = ""
    """Agent, client, model or local day; empty for a request without one, and in a total."""
    n_requests: int = 0
    n_failed: int = 0
    """Requests that failed; they count in no other sum."""
    n_prompt: int = 0
    n_cached: int = 0
    """Tokens of the prompts that were reused."""
    n_generated: int = 0
    seconds: float = 0.0
    """From the arrival of each request to its end."""
    saved_s: float = 0.0
    """Seconds that they would have taken more without the cache."""
    written_bytes: int | None = None
    """Bytes written to disk by all services of the home: of a day, and of all days."""
    price: float = 0.0
    """List price of these tokens at a cloud."""

    @property
    def n_read(self) -> int:
        """Tokens of the prompts that were computed."""
        return self.n_prompt - self.n_cached


class CloudPrice(Struct, frozen=True, forbid_unknown_fields=True):
    """List price of one model of a cloud, per million tokens."""

    name: str
    input: float
    cached: float
    """Tokens of a prompt that the cloud has in its cache."""
    output: float


class PriceTable(Struct, frozen=True, forbid_unknown_fields=True):
    """Table of list prices."""

    date: str
    """Day on which they were read."""
    currency: str
    default: str
    """Name of the price that is used unless another is named."""
    prices: tuple[CloudPrice, ...]


class UsageReport(Struct, frozen=True):
    """Usage since a moment, divided by a key."""

    since: float
    """Unix seconds: the quarter of an hour in which the report begins."""
    by: UsageKey
    rows: tuple[UsageSums, ...]
    total: UsageSums
    price: CloudPrice
    price_date: str
    currency: str
