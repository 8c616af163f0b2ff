"""The KV memory through HTTP and the command line (D9, D14, D16, D21, Z10)."""

import json
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

from mlxstack.cli.main import app
from mlxstack.core.formatting import count, short_time
from tests.api.running import Running

WORDS = " ".join(f"word{n}" for n in range(120))
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"{name} things. " * 8}}
    for name in ("read", "write", "search", "list")
]


def chat(http: httpx.Client, text: str, **more: object) -> httpx.Response:
    body: dict[str, object] = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    body |= more
    answer = http.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    return answer


def test_d14_the_cache_tells_what_it_holds(http: httpx.Client) -> None:
    before = http.get("/cache").json()
    chat(http, WORDS)
    hit = chat(http, WORDS)
    after = http.get("/cache").json()
    assert hit.headers["x-mlx-stack-cache-hit"] == "true"
    assert after["hour"]["n_requests"] - before["hour"]["n_requests"] == 2
    assert after["hour"]["n_hits"] - before["hour"]["n_hits"] == 1
    assert 0 < after["memory_bytes"] <= after["memory_budget"]


def test_d21_a_prefix_is_registered_pinned_and_released(http: httpx.Client) -> None:
    system = [{"role": "system", "content": "You read the whole book. " + WORDS}]
    done = http.post("/cache/prefixes", json={"name": "book-v1", "messages": system})
    assert done.status_code == 200, done.text
    assert done.json()["n_tokens"] >= 256
    for slot in range(3):
        http.post(f"/slots/{slot}?action=erase")
    http.post("/cache/clear").raise_for_status()
    asked = [*system, {"role": "user", "content": "Go on."}]
    hit = http.post("/v1/chat/completions", json={"messages": asked, "max_tokens": 2})
    assert int(hit.headers["x-mlx-stack-cache-prefix-tokens"]) >= 256
    names = {p["name"]: p for p in http.get("/cache").json()["prefixes"]}
    assert names["book-v1"]["is_pinned"]
    assert names["book-v1"]["n_hits"] >= 1
    assert http.delete("/cache/prefixes/book-v1").status_code == 200
    assert http.delete("/cache/prefixes/book-v1").status_code == 404


def test_d21_what_is_listed_is_pinned_by_its_id_and_tells_who_shares_it(http: httpx.Client) -> None:
    text = f"Everybody begins like this. {WORDS} " * 2
    for agent in ("sharing-1", "sharing-2"):
        chat(http, text, session_id=agent)
        http.delete(f"/v1/agents/{agent}?evict_only=1").raise_for_status()
    chat(http, text, session_id="sharing-1")
    chat(http, "Something else. " + WORDS, session_id="alone")
    listed = http.get("/cache").json()["prefixes"]
    shared = next(one for one in listed if {"sharing-1", "sharing-2"} <= set(one["agents"]))
    assert "alone" not in shared["agents"]
    body = {"name": "everybody", "id": shared["id"]}
    done = http.post("/cache/prefixes", json=body)
    assert done.json()["n_tokens"] == shared["n_tokens"], done.text
    http.post("/cache/clear").raise_for_status()
    found = {one["name"]: one for one in http.get("/cache").json()["prefixes"]}
    assert found["everybody"]["is_pinned"]
    assert http.delete("/cache/prefixes/everybody").status_code == 200
    assert http.post("/cache/prefixes", json={"name": "x", "id": "gone"}).status_code == 404
    assert http.post("/cache/prefixes", json={"id": shared["id"]}).status_code == 400
    both = http.post("/cache/prefixes", json={**body, "text": "a"})
    assert both.status_code == 400
    assert "either the id" in both.text


@pytest.mark.parametrize(
    "body",
    [
        {"name": "x"},
        {"name": "x", "text": WORDS, "tokens": [1]},
        {"name": "", "text": WORDS},
        {"name": "a/b", "text": WORDS * 2},
        {"name": "a/b", "id": "gone"},
        {"name": "x", "text": "too short"},
        {"name": "x", "tokens": [10**9] * 300},
        {"name": "x", "tokens": [1] * 5000},
    ],
)
def test_a_prefix_that_cannot_be_kept_is_refused(
    http: httpx.Client, body: dict[str, object]
) -> None:
    assert http.post("/cache/prefixes", json=body).status_code == 400


def test_z10_a_changed_tool_order_is_named_with_its_text(http: httpx.Client) -> None:
    chat(http, "Hello.", tools=TOOLS, session_id="order")
    moved = chat(http, "Hello.", tools=TOOLS[::-1], session_id="order")
    reason = moved.headers["x-mlx-stack-cache-miss-reason"]
    assert reason.startswith("diverged at token ")
    found = http.get("/requests/order").json()
    assert found["miss"]["reason"] == "diverged"
    assert "read" in found["miss"]["text_cached"]
    assert "list" in found["miss"]["text_sent"]


def test_a_miss_costs_the_same_in_headers_metrics_cache_and_command_line(
    live: Running, http: httpx.Client
) -> None:
    rules = [{"role": "system", "content": f"Rules of the house: {WORDS}"}]
    other = [{"role": "system", "content": f"Rules of this house: {WORDS}"}]
    say = [{"role": "user", "content": "Hello."}]
    for _ in range(2):
        chat(http, "", messages=rules + say, session_id="moving")
    new = chat(http, "", messages=[*rules, {"role": "user", "content": "Count the files."}])
    assert new.headers["x-mlx-stack-cache-miss-reason"].startswith("new conversation at token")
    assert new.headers["x-mlx-stack-cache-lost-tokens"] == "0"
    moved = chat(http, "", messages=other + say, session_id="moving")
    n_lost, lost_ms = (int(moved.headers[f"x-mlx-stack-cache-lost-{x}"]) for x in ("tokens", "ms"))
    assert 0 < n_lost <= int(moved.headers["x-mlx-stack-cache-new-tokens"])

    miss = http.get("/requests/moving").json()["miss"]
    assert (miss["n_lost"], round(1000 * miss["lost_s"])) == (n_lost, lost_ms)
    cache = http.get("/cache").json()
    assert cache["losses"] == sorted(cache["losses"], key=lambda one: -one["lost_s"])
    sums = {one["reason"]: one for one in cache["losses"]}
    assert sums["diverged"]["n_lost"] >= n_lost
    assert (sums["new conversation"]["n_lost"], sums["new conversation"]["lost_s"]) == (0, 0)
    told = samples(http.get("/metrics").text)
    for reason, one in sums.items():
        for name, field in (("misses", "n_misses"), ("lost_tokens", "n_lost")):
            assert told[f"mlxstack_cache_{name}_total", reason] == one[field]
        assert told["mlxstack_cache_lost_seconds_total", reason] == pytest.approx(one["lost_s"])

    why = CliRunner().invoke(app, ["cache", "why", "moving", "--url", live.url]).output
    assert f"lost {count(n_lost)} tokens, {short_time(miss['lost_s'])}" in why
    other_why = CliRunner().invoke(
        app, ["cache", "why", new.headers["x-mlx-stack-agent"], "--url", live.url]
    )
    assert other_why.output.splitlines()[-1].endswith("; lost nothing")
    status = CliRunner().invoke(app, ["cache", "status", "--url", live.url]).output
    _, _, costly = status.partition("Last misses, the costliest first:")
    assert f"moving: diverged at token {miss['at']}" in costly
    assert "new conversation" not in costly
    assert "new conversation" in status


def samples(text: str) -> dict[tuple[str, str], float]:
    """Samples of the metrics by name and reason."""
    families = text_string_to_metric_families(text)
    return {
        (one.name, one.labels.get("reason", "")): one.value for f in families for one in f.samples
    }


def test_cache_status_on_the_command_line(live: Running, http: httpx.Client) -> None:
    chat(http, WORDS)
    run = CliRunner().invoke(app, ["cache", "status", "--url", live.url])
    assert run.exit_code == 0, run.output
    for row in ("Prefix cache", "memory", "disk", "entries", "of the requests of the last hour"):
        assert row in run.output
    as_json = CliRunner().invoke(app, ["cache", "status", "--url", live.url, "--json"])
    assert json.loads(as_json.output)["is_enabled"] is True
    alone = CliRunner().invoke(app, ["cache", "--json", "--url", live.url])
    assert set(json.loads(alone.output)) == set(json.loads(as_json.output))


def test_cache_warm_and_why_on_the_command_line(
    live: Running, http: httpx.Client, tmp_path: Path
) -> None:
    file = tmp_path / "head.txt"
    file.write_text("A head of many words. " + WORDS)
    run = CliRunner().invoke(app, ["cache", "warm", "team#2?", str(file), "--url", live.url])
    assert run.exit_code == 0, run.output
    top = CliRunner().invoke(app, ["cache", "top", "--url", live.url])
    assert "team#2?" in top.output
    chat(http, "Why so slow?", session_id="asker")
    why = CliRunner().invoke(app, ["cache", "why", "asker", "--url", live.url])
    assert "prompt tokens reused" in why.output
    gone = CliRunner().invoke(app, ["cache", "unpin", "team#2?", "--url", live.url])
    assert gone.exit_code == 0, gone.output


def test_cache_status_of_a_service_that_is_down_fails() -> None:
    run = CliRunner().invoke(app, ["cache", "status", "--url", "http://127.0.0.1:9"])
    assert run.exit_code != 0
