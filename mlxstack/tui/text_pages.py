"""The screens as plain text, for `status --watch`, logs and pipes."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec.structs import replace

from mlxstack.tui.feed import Feed
from mlxstack.tui.state import DashboardState, reduce
from mlxstack.tui.views import agents, cache, costs, models, overview, requests, tiles
from mlxstack.tui.views.first_tokens import first_tokens
from mlxstack.tui.views.table_data import WIDE, Line, TableData, cell_text

GAP = "  "
MAX_ROWS = 10


def page(model: DashboardState, width: int) -> str:
    """The screens as text; of long lists the first rows."""
    banner = overview.banner(model)
    if not model.has_frame:
        return banner
    parts = []
    if banner:
        parts.append(banner)
    narrow = min(width, WIDE - 1)
    frame = model.frame
    parts += map(_line, overview.health(model, width))
    parts += [_line(line) for draw in tiles.TILES for line in draw(model, narrow)]
    lines = [overview.totals, first_tokens, overview.hint]
    parts += [_line(line) for draw in lines for line in draw(model, width)]
    parts += [_table(draw(model, width)) for draw in (overview.slots, overview.queue)]
    parts += [_begun(costs.costs(model, width))]
    if models.members(model):
        parts += [_begun(models.models(model, width))]
    if frame.cache is not None:
        parts += ["", *map(_line, cache.budget(model, width))]
        parts += [_table(draw(model, width)) for draw in (cache.rates, cache.prefixes)]
    if frame.agents:
        parts.append(_begun(agents.agents(model, width)))
    if frame.requests:
        parts.append(_begun(requests.requests(model, width)))
    return "\n".join(parts)


async def pages(feed: Feed, width: int, every_s: float) -> AsyncGenerator[str, None]:
    """Text page every `every_s` seconds, or when the link changes."""
    model = DashboardState()
    printed = DashboardState()
    async with aclosing(feed.news()) as stream:
        async for news in stream:
            model = reduce(model, news)
            is_due = model.frame.at >= printed.frame.at + every_s
            if is_due or model.link.state is not printed.link.state:
                printed = model
                yield page(model, width)


def _begun(table_data: TableData) -> str:
    """First rows; the keys that a heading names mean nothing here."""
    title = table_data.title[:1]
    rows = table_data.rows[:MAX_ROWS]
    return _table(replace(table_data, title=title, rows=rows))


def _line(line: Line) -> str:
    return "".join(cell.text for cell in line)


def _table(table_data: TableData) -> str:
    columns = table_data.columns
    rows = [[column.title for column in columns]]
    rows += [[cell.text for cell in row.cells] for row in table_data.rows]
    drawn = [GAP.join(map(cell_text, row, columns)).rstrip() for row in rows]
    body = drawn if table_data.rows else [table_data.note]
    return "\n".join(["", _line(table_data.title), *body])
