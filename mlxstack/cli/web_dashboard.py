"""Dashboard in local browsers, served by textual-serve."""

import base64
import binascii
import hashlib
import secrets
import shlex
import socket
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler
from textual_serve.app_service import AppService
from textual_serve.server import Server

from mlxstack.api.host_rules import host_rules
from mlxstack.cli.output import note
from mlxstack.core.errors import Forbidden, SetupError
from mlxstack.core.preset import ServerSpec

HOST = "127.0.0.1"
DASHBOARD = (sys.executable, "-m", "mlxstack.cli.main", "tui")
MAX_DASHBOARDS = 8
"""Browsers at a time: each has two processes of some 25 MiB."""
MAX_COLUMNS = 1000
MAX_ROWS = 500
"""Cells of a terminal; the dashboard draws all of them."""
MAX_DIGITS = 4
UNAVAILABLE = 503
PAGE = (Path(__file__).parent / "web_dashboard.html").read_text(encoding="utf-8")
FOCUS = 'addEventListener("load", () => document.querySelector(".xterm-helper-textarea").focus());'
"""Keys reach the terminal without a click first."""

DIGEST = base64.b64encode(hashlib.sha256(FOCUS.encode()).digest()).decode()
LOGIN = {"WWW-Authenticate": 'Basic realm="mlx-stack: the API key is the password"'}
HEADERS = {
    # Nothing from elsewhere is loaded. xterm.js writes its styles into the page.
    "Content-Security-Policy": (
        f"default-src 'none'; script-src 'self' 'sha256-{DIGEST}'; "
        "style-src 'self' 'unsafe-inline'; "
        "font-src 'self'; img-src 'self'; connect-src 'self' ws://{host}; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class WebDashboard(Server):
    """A page, and a dashboard process for each browser that opens it.

    Host and Origin are checked as by the service; `key` is wanted where the service wants one.
    """

    def __init__(self, options: Sequence[str], listener: socket.socket, key: str | None) -> None:
        port = listener.getsockname()[1]
        super().__init__(shlex.join((*DASHBOARD, *options)), HOST, port, "mlx-stack")
        self._listener = listener
        self._key = key
        self._check_host = host_rules(ServerSpec(host=HOST, port=port))
        self._n_dashboards = 0

    def run(self) -> None:
        """Serve until Ctrl-C."""
        web.run_app(self._make_app(), sock=self._listener, print=None)

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.middlewares.append(self._guard)
        return app

    async def on_startup(self, app: web.Application) -> None:
        """Tell the address, without the key."""
        del app
        note(f"dashboard at {self.public_url}/ for browsers on this computer; Ctrl-C ends it")

    async def handle_index(self, request: web.Request) -> web.Response:
        """Return the page, for the address in the browser."""
        page = PAGE.replace("{host}", escape(request.host)).replace("{focus}", FOCUS)
        return web.Response(text=page, content_type="text/html")

    async def handle_websocket(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
        """Run a dashboard for a browser, within bounds of number and size."""
        if self._n_dashboards >= MAX_DASHBOARDS:
            text = f"{MAX_DASHBOARDS} browsers show the dashboard already; close one\n"
            return web.Response(status=UNAVAILABLE, text=text)
        if not _is_size(request.query.get("width", "80"), request.query.get("height", "24")):
            return web.Response(status=400, text="width and height are no size of a terminal\n")
        self._n_dashboards += 1
        try:
            return await super().handle_websocket(request)
        finally:
            self._n_dashboards -= 1

    async def _process_messages(
        self, websocket: web.WebSocketResponse, app_service: AppService
    ) -> None:
        resize = app_service.set_terminal_size

        async def set_terminal_size(width: int, height: int) -> None:
            await resize(*_clipped(width, height))

        app_service.set_terminal_size = set_terminal_size  # type: ignore[method-assign]
        await super()._process_messages(websocket, app_service)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            self._check_host(request.headers, request.remote)
        except Forbidden as error:
            return web.Response(status=403, text=f"{error}\n")
        if self._key is not None and not secrets.compare_digest(
            _given_key(request.headers.get("Authorization", "")).encode(), self._key.encode()
        ):
            return web.Response(status=401, text="an API key is needed\n", headers=LOGIN)
        response = await handler(request)
        if not response.prepared:
            response.headers.update({k: v.format(host=request.host) for k, v in HEADERS.items()})
        return response


def serve(options: Sequence[str], port: int, key: str | None) -> None:
    """Serve `mlx-stack tui` with options. Raises SetupError for a taken port."""
    try:
        listener = socket.create_server((HOST, port))
    except OSError as error:
        raise SetupError(
            f"port {port} of {HOST} cannot be used: {error.strerror}; choose another --port"
        ) from error
    with listener:
        WebDashboard(options, listener, key).run()


def _clipped(width: int, height: int) -> tuple[int, int]:
    """Size of a terminal, within the bounds."""
    return max(1, min(int(width), MAX_COLUMNS)), max(1, min(int(height), MAX_ROWS))


def _is_size(width: str, height: str) -> bool:
    """Whether two texts are a size of a terminal within the bounds."""
    sides = ((width, MAX_COLUMNS), (height, MAX_ROWS))
    # Python refuses to read a number of many thousand digits.
    return all(
        text.isdecimal() and len(text) <= MAX_DIGITS and 0 < int(text) <= most
        for text, most in sides
    )


def _given_key(header: str) -> str:
    """Key of an Authorization header: bearer, or a browser's password."""
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    try:
        if scheme:
            return base64.b64decode(value).decode().partition(":")[2]
        return ""
    except (binascii.Error, UnicodeDecodeError):
        return ""
