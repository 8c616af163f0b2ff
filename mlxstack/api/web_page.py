"""Web page of a service: a chat and client snippets."""

from importlib.resources import files
from typing import Any

from litestar import MediaType, Request, Response, get
from litestar.params import FromPath

from mlxstack.api.guards import EARLY
from mlxstack.core.errors import NotFound

TYPES = {"css": "text/css", "js": "text/javascript"}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
"""The page loads nothing from other sites, and no site shows it in a frame."""

FOLDER = files("mlxstack.api") / "static"
PAGES = frozenset({"page.css", "page.js"})


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
