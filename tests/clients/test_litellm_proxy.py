"""LiteLLM's proxy in front of two services, with the configuration of docs/two-macs.md."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.running import running, tiny_preset
from tests.clients.stage import PROGRAMS
from tests.patience import PATIENCE_S, wait_until
from tests.ports import unused_port

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.soak]
PAGE = Path(__file__).parents[2] / "docs" / "two-macs.md"
LITELLM = PROGRAMS.with_name("litellm") / "bin" / "litellm"
"""An environment of its own, since aider pins an older version; see litellm.txt."""
CONFIG = re.compile(r"```yaml\n(model_list:.*?)```", re.DOTALL)
MASTER_KEY = "sk-2f8c1d7ab04e95630f3e"
MAX_AGENTS = 64
"""New agents until one is sent to the other service; each is by chance of one half."""


class Proxy:
    """Where agents speak to; `services` are those behind it by their addresses."""

    def __init__(self, url: str, services: dict[str, ExitStack]) -> None:
        headers = {"Authorization": f"Bearer {MASTER_KEY}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=PATIENCE_S)
        self.services = services

    def say(self, turns: list[dict[str, str]], header: str, session: str) -> tuple[str, Any]:
        """The address of the service that answers, and its answer."""
        body = {"model": "coder", "messages": turns, "max_tokens": 4, "temperature": 0}
        answer = self.http.post("/v1/chat/completions", json=body, headers={header: session})
        assert answer.is_success, answer.text
        return answer.headers["x-litellm-model-api-base"], answer.json()


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    if not LITELLM.exists():
        pytest.skip(f"{LITELLM} is not installed; tests/clients/litellm.txt names the version")
    folder = tmp_path_factory.mktemp("litellm")
    match = CONFIG.search(PAGE.read_text())
    assert match is not None
    config = match[1]
    port = unused_port()
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "MLX_STACK_KEY": "any",
        "LITELLM_MASTER_KEY": MASTER_KEY,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    with ExitStack() as stack:
        services = {}
        for name in ("mac-a", "mac-b"):
            opened = stack.enter_context(ExitStack())
            url = opened.enter_context(running(tiny_preset(folder / "model"), folder / name)).url
            services[f"{url}/v1"] = opened
            assert f"http://{name}.local:7119" in config
            config = config.replace(f"http://{name}.local:7119", url)
        (folder / "litellm.yaml").write_text(config)
        args = ["--config", "litellm.yaml", "--host", "127.0.0.1", "--port", str(port)]
        log = stack.enter_context((folder / "log").open("wb"))
        process = subprocess.Popen(
            [str(LITELLM), *args], cwd=folder, env=env, stdout=log, stderr=log
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        proxy = Proxy(f"http://127.0.0.1:{port}", services)
        stack.callback(proxy.http.close)

        def is_alive() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            with suppress(httpx.TransportError):
                return proxy.http.get("/health/liveliness").is_success
            return False

        wait_until(is_alive)
        yield proxy


def test_an_agent_stays_where_its_kv_is(proxy: Proxy) -> None:
    first = {"role": "user", "content": "Tell me about the weather in Paris and in Rome. " * 4}
    agents: dict[str, tuple[str, str, list[dict[str, str]], Any]] = {}
    for n in range(MAX_AGENTS):
        header = ("x-litellm-session-id", "x-session-id")[n % 2]
        session = f"session-{n:04}"
        turns = [{**first, "content": f"{n} {first['content']}"}]
        service, answer = proxy.say(turns, header, session)
        # The latest one of each service still has its slot.
        agents[service] = header, session, turns, answer
        if len(agents) == 2:
            break
    assert len(agents) == 2, "all agents were sent to one service"
    for service, (header, session, turns, last) in agents.items():
        reply = last
        for _ in range(5):
            turns += [
                {"role": "assistant", "content": reply["choices"][0]["message"]["content"]},
                {"role": "user", "content": "And tomorrow?"},
            ]
            n_before = reply["usage"]["prompt_tokens"]
            origin, reply = proxy.say(turns, header, session)
            assert origin == service
            assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= n_before - 2

    service, (header, session, turns, _) = agents.popitem()
    proxy.services[service].close()
    elsewhere, _ = proxy.say(turns, header, session)
    assert elsewhere in agents
    assert proxy.say(turns, header, session)[0] == elsewhere
