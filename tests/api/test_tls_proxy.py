"""A real TLS proxy in front of a service: the Caddyfile of docs/remote-access.md."""

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxstack.core.preset import ServerSpec
from tests.api.requests import chat_body
from tests.api.running import running, tiny_preset
from tests.cli import terminal as command
from tests.patience import PATIENCE_S, wait_until
from tests.ports import unused_port

DOCS = Path(__file__).parents[2] / "docs"
NAME = "ai.example.com"
KEY = "a-secret-key"
CADDYFILE = re.compile(r"```caddyfile\n(.*?)```", re.DOTALL)
CONFIG = """{{
	admin off
	skip_install_trust
	auto_https disable_redirects
	storage file_system {storage}
}}
"""

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.net,
    pytest.mark.skipif(
        shutil.which("caddy") is None,
        reason="caddy is not installed: no TLS proxy is tried in front of a service",
    ),
]


@contextmanager
def caddy(service: str, folder: Path) -> Iterator[httpx.Client]:
    """Client of a proxy with the documented Caddyfile, a local certificate and a free port."""
    port = unused_port()
    [site] = CADDYFILE.findall((DOCS / "remote-access.md").read_text(encoding="utf-8"))
    assert site.startswith(f"{NAME} {{\n") and "127.0.0.1:7109" in site
    names = f"https://{NAME}:{port}, https://localhost:{port}"
    site = site.replace(f"{NAME} {{\n", f"{names} {{\n\ttls internal\n")
    config = folder / "Caddyfile"
    options = CONFIG.format(storage=folder)
    config.write_text(options + site.replace("http://", "").replace("127.0.0.1:7109", service))
    command = ["caddy", "run", "--adapter", "caddyfile", "--config", str(config)]
    env = {"HOME": str(folder), "PATH": "/usr/bin:/bin"}
    with (folder / "caddy.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        root = folder / "pki" / "authorities" / "local" / "root.crt"
        local = folder / "certificates" / "local"
        needed = [root, *(local / name / f"{name}.crt" for name in (NAME, "localhost"))]
        wait_until(lambda: all(file.exists() for file in needed), (folder / "caddy.log").read_text)
        context = ssl.create_default_context(cafile=root)
        # The files are there a little before Caddy uses the certificates.
        wait_until(lambda: serves(port, context), (folder / "caddy.log").read_text)
        with httpx.Client(
            base_url=f"https://127.0.0.1:{port}", verify=context, timeout=PATIENCE_S
        ) as client:
            yield client
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def serves(port: int, context: ssl.SSLContext) -> bool:
    """Whether Caddy has a certificate for both names."""
    try:
        for name in (NAME, "localhost"):
            with (
                socket.create_connection(("127.0.0.1", port), PATIENCE_S) as plain,
                context.wrap_socket(plain, server_hostname=name),
            ):
                pass
    except OSError:
        return False
    return True


def ask(client: httpx.Client, path: str, **options: Any) -> httpx.Response:
    """Request with the name of the site, as if it were in the DNS."""
    headers = {"host": NAME, **options.pop("headers", {})}
    method = "POST" if "json" in options else "GET"
    request = client.build_request(
        method, path, headers=headers, extensions={"sni_hostname": NAME}, **options
    )
    return client.send(request)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def proxied(folder: Path) -> Iterator[httpx.Client]:
    server = ServerSpec(port=0, allowed_hosts=(NAME,), api_keys=(KEY,))
    with (
        running(tiny_preset(folder / "model", server=server), folder / "home") as here,
        caddy(here.url.removeprefix("http://"), folder) as client,
    ):
        yield client


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_a_caddy_in_front_serves_a_named_host_with_keys(proxied: httpx.Client, header: str) -> None:
    key = {header: f"Bearer {KEY}" if header == "authorization" else KEY}
    answer = ask(proxied, "/v1/chat/completions", json=chat_body(), headers=key)
    assert answer.status_code == 200, answer.text
    assert "alt-svc" in answer.headers, "it does not come from Caddy"
    refused = ask(proxied, "/v1/chat/completions", json=chat_body())
    assert refused.status_code == 401
    assert "API key" in refused.text


def test_a_stream_comes_whole_through_a_proxy(proxied: httpx.Client) -> None:
    key = {"x-api-key": KEY}
    plain = ask(proxied, "/v1/chat/completions", json=chat_body(), headers=key).json()
    streamed = ask(proxied, "/v1/chat/completions", json=chat_body(stream=True), headers=key)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    deltas = [choice["delta"].get("content") or "" for one in chunks for choice in one["choices"]]
    assert "".join(deltas) == plain["choices"][0]["message"]["content"]


def test_pages_of_the_proxied_name_are_its_own_and_others_are_not(proxied: httpx.Client) -> None:
    own = {"x-api-key": KEY, "origin": f"https://{NAME}"}
    assert ask(proxied, "/v1/chat/completions", json=chat_body(), headers=own).is_success
    foreign = {"x-api-key": KEY, "origin": "https://evil.example"}
    answer = ask(proxied, "/v1/chat/completions", json=chat_body(), headers=foreign)
    assert answer.status_code == 403


def test_the_command_trusts_the_certificate_that_a_variable_names(
    proxied: httpx.Client, folder: Path
) -> None:
    url = f"https://localhost:{proxied.base_url.port}"
    root = folder / "pki" / "authorities" / "local" / "root.crt"
    env = {**os.environ, "MLX_STACK_HOME": str(folder / "other"), "MLX_STACK_API_KEY": KEY}
    env["SSL_CERT_FILE"] = str(root)
    trusting = command.run(["slots", "--url", url], env)
    assert trusting.returncode == 0, trusting.stderr
    assert len(trusting.stdout.splitlines()) >= 4
    env.pop("SSL_CERT_FILE")
    assert "CERTIFICATE_VERIFY_FAILED" in command.run(["slots", "--url", url], env).stderr


def test_a_proxy_whose_name_is_not_allowed_is_refused_with_the_key_to_set(tmp_path: Path) -> None:
    preset = tiny_preset(tmp_path / "model")
    with (
        running(preset, tmp_path / "home") as here,
        caddy(here.url.removeprefix("http://"), tmp_path) as client,
    ):
        answer = ask(client, "/v1/models")
    assert answer.status_code == 403
    assert "server.allowed_hosts" in answer.text and NAME in answer.text
