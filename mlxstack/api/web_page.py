"""Web page of a service: a chat and client snippets."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any

from litestar import MediaType, Request, Response, get, post
from litestar.params import FromPath, JSONBody
from msgspec import Struct

from mlxstack.api.guards import EARLY
from mlxstack.api.markdown import MAX_CHARACTERS, RenderedText, rendered
from mlxstack.core.errors import NotFound, TooLarge
from mlxstack.host.coding_clients import CLIENTS, least_context

TYPES = {"css": "text/css", "js": "text/javascript"}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""The page loads nothing from other sites, no site shows it in a frame, and it parses no HTML."""

FOLDER = files("mlxstack.api") / "static"
PAGES = frozenset({
    "answer.js", "attachments.js", "markdown.js", "page.css", "page.js", "service.js", "slots.js",
    "snippets.js",
})  # fmt: skip

PARSERS = ThreadPoolExecutor(1, "markdown")
"""One text after the other: a hostile one takes a second of Python."""


class MarkdownText(Struct):
    """A text of an answer."""

    text: str


class PageClient(Struct, frozen=True):
    """Client, and the least tokens of a slot that it works with."""

    name: str
    least_context: int


def page_or(request: Request[Any, Any, Any], facts: dict[str, str]) -> Response[Any]:
    """The page for a browser, else the facts as JSON."""
    if "text/html" not in request.headers.get("accept", ""):
        return Response(facts, headers={"vary": "accept"})
    text = (FOLDER / "index.html").read_text("utf-8")
    return Response(text, media_type=MediaType.HTML, headers={**HEADERS, "vary": "accept"})


@get("/static/{name:str}", opt=EARLY, include_in_schema=False)
async def page_file(name: FromPath[str]) -> Response[str]:
    """A file of the page. Raises NotFound for other names."""
    if name not in PAGES:
        raise NotFound(f"there is no file `{name}` in the web page")
    text = (FOLDER / name).read_text("utf-8")
    return Response(text, media_type=TYPES[name.rpartition(".")[2]], headers=HEADERS)


@get("/page/clients", opt=EARLY, include_in_schema=False)
async def page_clients() -> list[PageClient]:
    """Clients that the page names."""
    return [PageClient(name, least_context(name)) for name in CLIENTS]


@post("/page/markdown", status_code=200, opt={"is_early": True}, include_in_schema=False)
async def page_markdown(data: JSONBody[MarkdownText]) -> RenderedText:
    """Blocks of an answer's text. Raises TooLarge."""
    if len(data.text) > MAX_CHARACTERS:
        raise TooLarge(f"the text has more than {MAX_CHARACTERS} characters; send it in parts")
    return await asyncio.get_running_loop().run_in_executor(PARSERS, rendered, data.text)


PAGE_ROUTES: list[Any] = [page_file, page_clients, page_markdown]
