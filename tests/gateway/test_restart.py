"""Agents of a member that is not the default one, over a restart of the gateway."""

from pathlib import Path

import httpx
import pytest

from tests.gateway.real_members import Site, serving, write_presets
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

TURN = {"append": [{"role": "user", "content": "Hello!"}], "max_tokens": 4, "temperature": 0}


def model(http: httpx.Client, agent: str, **more: str) -> str:
    """Model of the agent's next turn."""
    answer = http.post(f"/v1/agents/{agent}/generate", json={**TURN, **more}).raise_for_status()
    return str(answer.json()["model"])


def client(site: Site) -> httpx.Client:
    return httpx.Client(base_url=site.url, timeout=PATIENCE_S)


def test_agents_follow_their_member_over_a_restart(tmp_path: Path) -> None:
    files = write_presets(tmp_path, {"port": 0})[:2]
    with serving(tmp_path, files) as site, client(site) as http:
        assert [model(http, "ann", model=name) for name in ("tiny", "demo", "tiny")] == [
            "tiny", "demo", "tiny",
        ]  # fmt: skip
        http.post("/v1/agents/ann/fork", json={"id": "ben"}).raise_for_status()
        assert model(http, "ben") == "tiny"
        http.post("/v1/agents/ann/fork", json={"id": "cid"}).raise_for_status()
        created = http.post("/v1/agents?model=tiny", json={"id": "dan"}).raise_for_status()
        assert created.headers["x-mlx-stack-agent"] == "dan"
        moved = {"messages": [], "facts": {}, "manifest": None}
        http.put("/v1/agents/eva/kv?model=tiny", json=moved).raise_for_status()
        assert http.get("/v1/agents/eva").status_code == 200
    with serving(tmp_path, files) as site, client(site) as http:
        model_of = {name: model(http, name) for name in ("ann", "ben", "cid", "dan", "eva", "fay")}
    assert model_of == dict.fromkeys(("ann", "ben", "cid", "dan", "eva"), "tiny") | {"fay": "demo"}
