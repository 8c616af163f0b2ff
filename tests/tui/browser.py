"""A real Chromium without a window, driven by its DevTools protocol."""

import base64
import itertools
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

from tests.patience import PATIENCE_S, wait_until

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[a-zA-Z]|\][^\x07]*\x07|[()=>].?)")


class Browser:
    """One tab; `requests` are the addresses that it loaded, `terminal` the text it was sent."""

    def __init__(self, connection: ClientConnection) -> None:
        self.requests: list[str] = []
        self.statuses: list[int] = []
        self.terminal = ""
        self._connection = connection
        self._ids = itertools.count(1)
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Result of a command; events that come before it are noted."""
        wanted = next(self._ids)
        self._connection.send(json.dumps({"id": wanted, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(PATIENCE_S))
            if message.get("id") == wanted:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message)

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)

    def press(self, *keys: str) -> None:
        """Press keys that write a character each, or Enter; what was shown before is forgotten."""
        self.terminal = ""
        for key in keys:
            code = {"windowsVirtualKeyCode": 13} if key == "Enter" else {}
            text = "\r" if key == "Enter" else key
            self.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, **code)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    def until(self, is_so: Callable[[str], bool], wanted: str) -> None:
        """Wait until the text of the terminal is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so(self.terminal):
            assert time.monotonic() < deadline, f"never seen: {wanted}; {self.terminal[-3000:]}"
            try:
                self._note(json.loads(self._connection.recv(0.2)))
            except TimeoutError:
                continue

    def shows(self, text: str) -> None:
        """Wait until these words were sent."""
        self.until(lambda seen: text in seen, text)

    def screenshot(self) -> bytes:
        """The tab as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _note(self, message: dict[str, Any]) -> None:
        told = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(told["request"]["url"])
            case "Network.webSocketCreated":
                self.requests.append(told["url"])
            case "Network.responseReceived":
                self.statuses.append(told["response"]["status"])
            case "Network.webSocketFrameReceived" if told["response"]["opcode"] == 2:
                text = base64.b64decode(told["response"]["payloadData"]).decode(errors="replace")
                self.terminal += ESCAPE.sub("", text)


@contextmanager
def chromium(folder: Path, width: int = 1280, height: int = 800) -> Iterator[Browser]:
    """Start it with a profile of its own."""
    assert CHROMIUM is not None
    # As root, and in a container, its sandbox cannot be set up.
    process = subprocess.Popen(
        [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--remote-debugging-port=0", f"--user-data-dir={folder}",
            f"--window-size={width},{height}", "about:blank",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        with connect(_tab(folder / "DevToolsActivePort"), max_size=None) as connection:
            yield Browser(connection)
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def _tab(file: Path) -> str:
    """Address of the DevTools of the first tab."""
    wait_until(lambda: file.exists() and file.read_text().count("\n"), "Chromium did not start")
    port = file.read_text().split("\n")[0]
    tabs = httpx.get(f"http://127.0.0.1:{port}/json/list").json()
    return str(next(one for one in tabs if one["type"] == "page")["webSocketDebuggerUrl"])
