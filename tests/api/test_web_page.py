"""The web page at `/`: for browsers only, loads nothing from elsewhere, and chats."""

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from mlxstack.api.markdown import MAX_CHARACTERS
from mlxstack.core.preset import ServerSpec
from mlxstack.demo import MODEL_DIR
from mlxstack.host.coding_clients import CLIENTS, is_large_enough
from tests.api.running import Running, running, tiny_preset
from tests.tui.browser import CHROMIUM, Browser, chromium

pytestmark = [pytest.mark.mlx, pytest.mark.net]

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
STATIC = Path(__file__).parents[2] / "mlxstack" / "api" / "static"
KEY = "secret"


def test_a_browser_gets_the_page_and_a_program_the_facts(http: httpx.Client) -> None:
    page = http.get("/", headers=BROWSER)
    facts = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert page.headers["vary"] == facts.headers["vary"] == "accept"
    assert facts.json()["name"] == "mlx-stack"


def test_the_page_loads_nothing_from_elsewhere(http: httpx.Client) -> None:
    text = http.get("/", headers=BROWSER).text
    addresses = re.findall(r'(?:src|href)="([^"]+)"', text)
    assert {"/static/page.js", "/static/page.css"} < set(addresses)
    for address in addresses:
        assert address.startswith("/")
        assert http.get(address).status_code == 200
    for path in STATIC.iterdir():
        assert not re.search(r"(?:import|url\(|https?://)\s*['\"(]*https?:", path.read_text())


@pytest.mark.parametrize("name", ["index.html", "__init__.py", "..%2fapp.py", "other.js"])
def test_no_other_file_is_served(http: httpx.Client, name: str) -> None:
    assert http.get(f"/static/{name}").status_code in (400, 404)


def test_the_page_is_refused_to_another_host(http: httpx.Client) -> None:
    for path in ("/", "/static/page.js"):
        assert http.get(path, headers={**BROWSER, "host": "evil.com"}).status_code == 403


def test_the_page_offers_clients_with_their_least_context(http: httpx.Client) -> None:
    least = {one["name"]: one["least_context"] for one in http.get("/page/clients").json()}
    assert list(least) == list(CLIENTS)
    for client, n_tokens in least.items():
        assert is_large_enough(client, n_tokens)
        assert not n_tokens or not is_large_enough(client, n_tokens - 1)


def test_every_file_of_the_page_is_served_and_parses_no_html(http: httpx.Client) -> None:
    for path in STATIC.iterdir():
        text = path.read_text("utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text)
        assert not re.search(r"\son[a-z]+=|<style|style=", text)
        if path.name != "index.html":
            assert http.get(f"/static/{path.name}").text == text
    policy = http.get("/", headers=BROWSER).headers["content-security-policy"]
    assert "require-trusted-types-for 'script'" in policy and "unsafe" not in policy


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"authorization": "Bearer wrong"}, 401), ({"host": "evil.com"}, 403)],
)
def test_markdown_is_for_those_with_a_key(
    demo: Running, headers: dict[str, str], status: int
) -> None:
    url = f"{demo.url}/page/markdown"
    body = {"text": "# a"}
    assert httpx.post(url, json=body, headers=headers).status_code == status
    answer = httpx.post(url, json=body, headers={"authorization": f"Bearer {KEY}"})
    assert answer.json() == {"finished": [], "last": [["h1", {}, "a"]], "n_finished": 0}


@pytest.mark.parametrize(
    ("body", "status"), [({"text": "x" * (MAX_CHARACTERS + 1)}, 413), ({}, 400), ({"text": 1}, 400)]
)
def test_other_bodies_are_refused(http: httpx.Client, body: Any, status: int) -> None:
    assert http.post("/page/markdown", json=body).status_code == status


SHOW = """
import { curlOf, pythonOf } from "./snippets.mjs";
const origin = "http://localhost:7109";
console.log(JSON.stringify([curlOf(origin, process.argv[2]), pythonOf(origin, process.argv[2])]));
"""
HOSTILE = (
    "x'; touch PWNED; '",
    '"); __import__("os").system("touch PWNED"); ("',
    "$(touch PWNED)`touch PWNED`\\",
    "a\x1b[201~\ntouch PWNED\n\r\u202egnp\x9b\u2028\U000e0001",
    "模型 😀",
)


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's functions with Node.js")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_snippet_with_any_name_is_one_command_with_that_name(tmp_path: Path, name: str) -> None:
    shutil.copy(STATIC / "snippets.js", tmp_path / "snippets.mjs")
    (tmp_path / "show.mjs").write_text(SHOW)
    told = subprocess.run(
        ["node", tmp_path / "show.mjs", name], capture_output=True, text=True, check=True
    )
    command, program = json.loads(told.stdout)
    assert command.isprintable()
    assert program.replace("\n", "").isprintable()
    assert program.count("\n") == 3
    curl = tmp_path / "curl"
    curl.write_text('#!/bin/sh\nfor word; do printf "%s\\0" "$word"; done\n')
    curl.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    run = subprocess.run(
        ["sh", "-c", command], env=env, cwd=tmp_path, capture_output=True, check=True
    )
    arguments = run.stdout.decode().split("\0")
    assert len(arguments) == 6 and arguments[3] == "-d"
    assert json.loads(arguments[4])["model"] == name
    assert not (tmp_path / "PWNED").exists()
    calls = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.keyword)]
    assert [ast.literal_eval(call.value) for call in calls if call.arg == "model"] == [name]


def value(browser: Browser, expression: str) -> Any:
    """Value of a JavaScript expression in the page."""
    return browser.call("Runtime.evaluate", expression=expression)["result"].get("value")


def wait_for(browser: Browser, expression: str) -> Any:
    """Wait in the page until the expression is true, and return its value."""
    code = f"""new Promise((resolve) => {{
        const look = () => {{ const is = {expression}; is ? resolve(is) : setTimeout(look, 20); }};
        look();
    }})"""
    answer = browser.call("Runtime.evaluate", expression=code, awaitPromise=True)
    return answer["result"].get("value")


def send(browser: Browser, text: str) -> None:
    """Type a message and send it."""
    browser.call("Runtime.evaluate", expression="document.getElementById('prompt').focus()")
    browser.call("Input.insertText", text=text)
    browser.press("Enter")


FIGURES = "document.querySelectorAll('.figures')"


@pytest.fixture
def demo(tmp_path: Path) -> Any:
    """A service of the demo model with an API key."""
    preset = structs.replace(
        tiny_preset(MODEL_DIR), name="demo", server=ServerSpec(port=0, api_keys=(KEY,))
    )
    with running(preset, tmp_path / "home") as live:
        yield live


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_chromium_chats_and_shows_the_reuse_of_the_second_turn(
    demo: Running, tmp_path: Path
) -> None:
    with chromium(tmp_path / "profile") as browser:
        browser.open(demo.url)
        wait_for(browser, "document.getElementById('model')?.value")
        wait_for(browser, "!document.getElementById('key-form').hidden")
        send(browser, "Hello!")
        wait_for(browser, "document.getElementById('prompt').value")
        set_key = f"""document.getElementById('key').value = {KEY!r};
            document.getElementById('key-form').requestSubmit();"""
        browser.call("Runtime.evaluate", expression=set_key)
        wait_for(browser, "document.getElementById('stop').hidden")
        browser.call(
            "Runtime.evaluate", expression="document.getElementById('prompt-form').requestSubmit()"
        )
        first = wait_for(browser, f"{FIGURES}[0]?.textContent")
        assert re.match(r"\d+ prompt tokens, 0 reused \(0 %\), \d+ generated", first)
        answer = value(browser, "document.querySelectorAll('li.assistant')[1].textContent")
        assert answer.partition(first)[0].strip()
        wait_for(browser, "document.getElementById('stop').hidden")
        send(browser, "And again: hello!")
        second = wait_for(browser, f"{FIGURES}[1]?.textContent")
        reused = re.match(r"\d+ prompt tokens, (\d+) reused", second)
        assert reused is not None and int(reused[1]) > 0
        assert all(url.startswith(demo.url) for url in browser.requests)
        snippets = value(browser, "document.getElementById('snippets').textContent")
        assert f"mlx-stack env openai --url {demo.url}" in snippets
        assert "mlx-stack run" not in snippets, "no client fits 1,024 tokens"
        assert f"mlx-stack tui --web --url {demo.url}" in value(
            browser, "document.body.textContent"
        )
        assert KEY not in snippets
