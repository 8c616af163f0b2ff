"""`usage`: tokens, seconds, bytes and list price of a home's services."""

import os
import time
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlencode

import typer

from mlxstack.cli.output import say, table
from mlxstack.cli.service_request import ServiceOptions
from mlxstack.cli.verbs import VerbResult
from mlxstack.core.formatting import count, printable, size, span
from mlxstack.core.usage_key import UsageKey

if TYPE_CHECKING:
    from mlxstack.core.usage import CloudPrice, UsageReport, UsageSums

Since = Annotated[str, typer.Option("--since", help="How far back: 12h, 7d, 4w.")]
By = Annotated[UsageKey, typer.Option("--by", help="Divide by agent, client, model or day.")]
Price = Annotated[str | None, typer.Option("--price", help="Another price of the table.")]
Url = Annotated[str | None, typer.Option("--url", help="URL of a remote service.")]
NO_NAME = "(none)"
MAX_NAME_WIDTH = 40


def usage(
    since: Since = "7d", by: By = UsageKey.DAY, price: Price = None, url: Url = None
) -> VerbResult:
    """Show tokens, seconds, bytes and list price of finished requests.

    Of all services of the home, also those that do not run; with --url of the home of a service.
    """
    report = _remote(since, by, price, url) if url else _local(since, by, price)
    return VerbResult(report, lambda: _show(report, since))


def _local(since: str, by: UsageKey, price: str | None) -> "UsageReport":
    from mlxstack.features.usage.report import UsageQuery
    from mlxstack.features.usage.store import UsageStore
    from mlxstack.host.home import home_from
    from mlxstack.store.write_counter import WriteCounter

    home = home_from(os.environ)
    query = UsageQuery(home, UsageStore(home.usage_file), WriteCounter(home.writes_file))
    return query.report(since, by, price, time.time())


def _remote(since: str, by: UsageKey, price: str | None, url: str) -> "UsageReport":
    from mlxstack.core.usage import UsageReport

    query = {"since": since, "by": by.value} | ({"price": price} if price else {})
    path = f"/usage?{urlencode(query)}"
    return ServiceOptions(url=url).ask(lambda client: client.get(path, UsageReport))


def _show(report: "UsageReport", since: str) -> None:
    """Print the report as a table with its total."""
    headings = (
        report.by.value.upper(), "REQUESTS", "READ", "REUSED", "WRITTEN", "TIME", "SAVED", "DISK",
        "LIST PRICE",
    )  # fmt: skip
    names = [printable(row.key, MAX_NAME_WIDTH) or NO_NAME for row in report.rows]
    rows = [_row(name, row, report) for name, row in zip(names, report.rows, strict=True)]
    table(headings, [*rows, _row("total", report.total, report)], ("DISK", "TIME", "REQUESTS"))
    say("")
    say(f"Of the last {since}. READ tokens of prompts were computed, REUSED ones were not.")
    say(f"LIST PRICE: {_terms(report.price, report.currency)}, as of {report.price_date}.")


def _row(name: str, sums: "UsageSums", report: "UsageReport") -> tuple[object, ...]:
    return (
        name,
        count(sums.n_requests),
        count(sums.n_read),
        count(sums.n_cached),
        count(sums.n_generated),
        span(sums.seconds),
        span(sums.saved_s),
        "" if sums.written_bytes is None else size(sums.written_bytes),
        f"{sums.price:.2f} {report.currency}",
    )


def _terms(price: "CloudPrice", currency: str) -> str:
    amounts = f"{price.input:g} {currency} read, {price.cached:g} reused, {price.output:g} written"
    return f"{price.name}, {amounts}, per million tokens"
