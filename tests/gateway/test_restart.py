"""Agents of a member that is not the default one, over a restart of the gateway."""

from pathlib import Path

import httpx
import pytest

from tests.gateway.site import Site, serving, write_presets

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

TURN = {"append": [{"role": "user", "content": "Hello!"}], "max_tokens": 4, "temperature": 0}


def model(http: httpx.Client, agent: str, **more: str) -> str:
    """Model of the agent's next turn."""
    answer = http.post(f"/v1/agents/{agent}/generate", json={**TURN, **more}).raise_for_status()
    return str(answer.json()["model"])


def client(site: Site) -> httpx.Client:
    return httpx.Client(base_url=site.url, timeout=120)


def test_agents_follow_their_member_over_a_restart(tmp_path: Path) -> None:
    files = write_presets(tmp_path, {"port": 0})[:2]
    with serving(tmp_path, files) as site, client(site) as http:
        assert [model(http, "ann", model=name) for name in ("tiny", "demo", "tiny")] == [
            "tiny", "demo", "tiny",
        ]  # fmt: skip
    with serving(tmp_path, files) as site, client(site) as http:
        found = {name: model(http, name) for name in ("ann", "fay")}
    assert found == {"ann": "tiny", "fay": "demo"}
