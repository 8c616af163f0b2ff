"""Price table: that of the user, else the builtin one."""

from mlxstack.config.presets import builtin_folder, read_struct
from mlxstack.core.errors import BadRequest, SetupError
from mlxstack.core.usage import CloudPrice, PriceTable, UsageSums
from mlxstack.host.home import Home

FILE = "prices/cloud.yaml"


def price_table(home: Home) -> PriceTable:
    """Table of list prices. Raises SetupError for a file that is none."""
    own = home.presets / FILE
    path = own if own.exists() else builtin_folder() / FILE
    table = read_struct(path, PriceTable)
    if all(price.name != table.default for price in table.prices):
        raise SetupError(f"{path}: default is {table.default}, which is none of its prices")
    return table


def price_named(table: PriceTable, name: str | None) -> CloudPrice:
    """Price of this name, the default without one. Raises BadRequest."""
    name = name or table.default
    for price in table.prices:
        if price.name == name:
            return price
    names = ", ".join(price.name for price in table.prices)
    raise BadRequest(f"no price is called {name}; the table has {names}", "price")


def price_of(sums: UsageSums, price: CloudPrice) -> float:
    """List price of tokens, in the currency of the table."""
    n_read = sums.n_prompt - sums.n_cached
    cost = n_read * price.input + sums.n_cached * price.cached
    return (cost + sums.n_generated * price.output) / 1e6
