"""Requests through a gateway: its doors first, then members by name, started on demand."""

import socket
import subprocess
import sys
from urllib.parse import urlsplit

import anthropic
import httpx
import ollama
import openai
import pytest

from mlxstack.api.protocols import dialect_of
from mlxstack.api.registry import DIALECTS
from mlxstack.api.registry import dialect_of as routed_dialect_of
from tests.gateway.real_members import Site, n_workers, until
from tests.patience import PATIENCE_S, wait_until

pytestmark = [pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

HELLO = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 6, "temperature": 0}
ADDRESS = "/v1/chat/completions"
BOB = {"authorization": "Bearer bobs"}


def test_nothing_opens_without_a_key_and_nothing_wakes(site: Site) -> None:
    with httpx.Client(base_url=site.url, timeout=PATIENCE_S) as plain:
        for path in (
            ADDRESS,
            "/v1/messages",
            "/api/chat",
            "/completion",
            "/v1/agents/bob/generate",
        ):
            refused = plain.post(path, json={**HELLO, "model": "demo"})
            assert refused.status_code == 401 and refused.headers["x-request-id"], path
            assert "API key" in refused.text
        wrong = plain.post(
            ADDRESS, json={**HELLO, "model": "demo"}, headers={"x-api-key": "sesame2"}
        )
        assert wrong.status_code == 401 and "Invalid API Key" in wrong.text
        for path in ("/metrics", "/props", "/slots", "/v1/agents", "/requests"):
            assert plain.get(path).status_code == 401, path
        for path in ("/health", "/v1/models", "/models/demo", "/api/tags"):
            assert plain.get(path).status_code == 200, path
    assert n_workers(site.home) == 0


@pytest.mark.parametrize(
    "headers", [{"host": "evil.example"}, {"origin": "https://evil.example"}, {"origin": "null"}]
)
def test_foreign_hosts_and_pages_are_refused(site: Site, headers: dict[str, str]) -> None:
    with httpx.Client(base_url=site.url, timeout=PATIENCE_S) as plain:
        key = {"authorization": "Bearer sesame"}
        assert (
            plain.post(
                ADDRESS, json={**HELLO, "model": "demo"}, headers={**key, **headers}
            ).status_code
            == 403
        )
        assert plain.get("/v1/models", headers=headers).status_code == 403
    assert n_workers(site.home) == 0


def test_a_browser_gets_the_page(site: Site) -> None:
    page = httpx.get(site.url, headers={"accept": "text/html"})
    assert page.headers["content-type"].startswith("text/html")
    assert httpx.get(f"{site.url}/static/page.js").status_code == 200
    assert httpx.get(f"{site.url}/page/clients").json()[0]["name"] == "claude"
    markdown = f"{site.url}/page/markdown"
    body = {"text": "# a"}
    assert httpx.post(markdown, json=body).status_code == 401
    answer = httpx.post(markdown, json=body, headers={"authorization": "Bearer sesame"})
    assert answer.json()["last"] == [["h1", {}, "a"]]
    assert httpx.get(site.url).json()["name"] == "mlx-stack"
    assert httpx.get(site.url, headers={"host": "evil.com"}).status_code == 403


def test_preflights_are_answered_without_a_member(site: Site) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    with httpx.Client(base_url=site.url, timeout=PATIENCE_S) as plain:
        near = plain.options(ADDRESS, headers={**asked, "origin": "http://localhost:3000"})
        assert near.status_code == 200
        assert near.headers["access-control-allow-origin"] == "http://localhost:3000"
        far = plain.options(ADDRESS, headers={**asked, "origin": "https://evil.example"})
        assert far.status_code == 403
    assert n_workers(site.home) == 0


def test_bodies_are_bounded(site: Site) -> None:
    long = {**HELLO, "model": "demo", "messages": [{"role": "user", "content": "x" * 60_000}]}
    key = {"authorization": "Bearer sesame"}
    with httpx.Client(base_url=site.url, timeout=PATIENCE_S, headers=key) as http:
        refused = http.post(ADDRESS, json=long)
        assert refused.status_code == 413 and "max_body_bytes" in refused.text
        chunks = (b"x" * 1000 for _ in range(100))
        assert http.post("/v1/messages", content=chunks).status_code == 413


def test_a_long_head_is_refused(site: Site) -> None:
    parts = urlsplit(site.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S) as caller:
        caller.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"x" * 70_000)
        assert caller.recv(4096).startswith(b"HTTP/1.1 431")


def test_the_process_holds_no_mlx() -> None:
    code = "import sys, mlxstack.gateway.__main__; print({'mlx', 'mlx_lm'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_gateway_and_service_have_the_same_dialects() -> None:
    paths = {path for dialect in DIALECTS for route in dialect.routes for path in route.paths}
    assert len(paths) > 40
    for path in paths:
        gate = dialect_of(path)
        service = routed_dialect_of(path)
        assert gate.heartbeat == service.heartbeat and gate.error_body is service.error_body
        assert gate.statuses == service.statuses and gate.stream_type == service.stream_type


def test_status_starts_nothing_and_the_first_request_does(site: Site, http: httpx.Client) -> None:
    for path in ("/", "/health", "/v1/models", "/models", "/api/tags", "/api/ps", "/metrics"):
        assert http.get(path).status_code == 200, path
    assert http.get("/props").status_code == 503
    before = {card["status"]["value"] for card in site.models().values()}  # type: ignore[index]
    assert before == {"unloaded"}
    assert set(site.models()) == {"demo", "tiny", "demo-embedding"}
    answer = http.post(ADDRESS, json={**HELLO, "model": "demo"})
    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]
    assert site.models()["demo"]["status"] == {"value": "loaded"}
    assert site.models()["tiny"]["status"] == {"value": "unloaded"}
    assert http.get("/props").json()["model_alias"] == "demo"


def test_the_model_chooses_the_member(site: Site, http: httpx.Client) -> None:
    answers = {
        name: http.post(ADDRESS, json={**HELLO, "model": name}).raise_for_status().json()
        for name in ("demo", "tiny", "second")
    }
    texts = {name: answer["choices"][0]["message"] for name, answer in answers.items()}
    assert texts["tiny"] == texts["second"] != texts["demo"]
    for path in (ADDRESS, "/v1/messages", "/api/chat"):
        refused = http.post(path, json={**HELLO, "model": "gpt-5-mini"})
        assert refused.status_code == 404
        assert "served are demo, tiny, demo-embedding" in refused.text
    direct = site.state("demo").spec.url + ADDRESS
    assert httpx.post(direct, json=HELLO, timeout=PATIENCE_S).status_code == 401
    vectors = http.post("/v1/embeddings", json={"model": "vectors", "input": "hi"})
    assert len(vectors.raise_for_status().json()["data"][0]["embedding"]) > 8
    assert http.post("/tokenize?model=tiny", json={"content": "hi"}).json()["tokens"]


def test_streams_pass_unchanged(site: Site, http: httpx.Client) -> None:
    body = {**HELLO, "model": "demo", "stream": True, "stream_options": {"include_usage": True}}
    whole = http.post(ADDRESS, json={**HELLO, "model": "demo"}).json()
    with http.stream("POST", ADDRESS, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = "".join(answer.iter_text())
    assert text.endswith("data: [DONE]\n\n") and text.count("[DONE]") == 1
    key = {"api_key": "sesame", "max_retries": 0}
    with openai.OpenAI(base_url=f"{site.url}/v1", **key) as sdk:  # type: ignore[arg-type]
        pieces = sdk.chat.completions.create(**body)  # type: ignore[call-overload]
        joined = "".join(chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices)
    assert joined == whole["choices"][0]["message"]["content"]


def test_other_dialects(site: Site) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    with anthropic.Anthropic(base_url=site.url, api_key="sesame", max_retries=0) as sdk:
        reply = sdk.messages.create(model="tiny", messages=messages, max_tokens=4)  # type: ignore[arg-type]
        assert reply.model == "tiny" and reply.usage.output_tokens == 4
    key = {"authorization": "Bearer sesame"}
    with ollama.Client(site.url, headers=key) as client:
        lines = list(client.chat("demo:latest", messages, stream=True, options={"num_predict": 4}))
        assert lines[-1].done and {model.model for model in client.list().models} >= {
            "demo",
            "tiny",
        }
        assert client.ps().models and client.show("tiny").capabilities


def test_an_agent_follows_its_model(http: httpx.Client) -> None:
    append = {"append": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    first = http.post("/v1/agents/carol/generate", json={**append, "model": "tiny"})
    assert first.status_code == 200 and first.headers["x-mlx-stack-agent"] == "carol"
    again = http.post("/v1/agents/carol/generate", json=append)
    assert int(again.headers["x-mlx-stack-cache-prefix-tokens"]) > 0
    history = http.get("/v1/agents/carol/history").json()["messages"]
    assert [message["role"] for message in history] == ["user", "assistant"] * 2


def test_the_agents_of_all_members_are_listed(site: Site, http: httpx.Client) -> None:
    append = {"append": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    for agent, model in (("dora", "demo"), ("emil", "tiny"), ("both", "demo"), ("both", "tiny")):
        body = {**append, "model": model}
        http.post(f"/v1/agents/{agent}/generate", json=body).raise_for_status()
    gone = {"model": "tiny", "keep_alive": 0}
    http.post("/api/generate", json=gone).raise_for_status()
    until(lambda: site.models()["tiny"]["status"] == {"value": "unloaded"}, "it stays")
    listed = {card["id"]: card for card in http.get("/v1/agents").json()["data"]}
    assert {name: listed[name]["member"] for name in ("dora", "emil", "both")} == {
        "dora": "demo", "emil": "second", "both": "second",
    }  # fmt: skip
    assert listed["emil"]["n_requests"] == 1 and listed["emil"]["bytes"]["disk"] > 0
    assert site.models()["tiny"]["status"] == {"value": "unloaded"}, "the list woke it"
    assert [card["id"] for card in http.get("/v1/agents", headers=BOB).json()["data"]] in (
        [],
        ["bob"],
    )
    created = http.post("/v1/agents", json={"id": "fred"}).raise_for_status().json()
    assert created["id"] == "fred" and "fred" in http.get("/v1/agents").text


def test_the_embedding_member_embeds_for_both_clients(site: Site) -> None:
    texts = ["hello", "another text"]
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key="sesame", max_retries=0) as sdk:
        vectors = [
            row.embedding for row in sdk.embeddings.create(model="demo-embedding", input=texts).data
        ]
    key = {"authorization": "Bearer sesame"}
    with ollama.Client(site.url, headers=key) as client:
        embedded = client.embed("demo-embedding:latest", texts)
        single = client.embeddings("vectors", texts[0])
        with pytest.raises(ollama.ResponseError, match="embedding"):
            client.embed("demo", texts)
    assert embedded.model == "demo-embedding:latest" and embedded.prompt_eval_count
    for vector, expected in zip(embedded.embeddings, vectors, strict=True):
        assert vector == pytest.approx(expected, abs=1e-6)
    assert len(single.embedding) == len(vectors[0]) and vectors[0] != vectors[1]


def test_the_members_of_a_gateway_are_fixed(http: httpx.Client) -> None:
    refused = http.post("/v1/models/load", json={"preset": "demo"})
    assert refused.status_code == 501 and "start it again" in refused.json()["error"]["message"]


def test_a_key_of_some_agents_stays_one(site: Site) -> None:
    append = {"append": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "model": "demo"}
    with httpx.Client(base_url=site.url, timeout=PATIENCE_S, headers=BOB) as bob:
        own = bob.post("/v1/agents/bob/generate", json=append)
        assert own.status_code == 200, own.text
        refused = bob.post("/v1/agents/alice/generate", json=append)
        assert refused.status_code == 403 and "allowed: bob" in refused.text
        assert bob.post(ADDRESS, json={**HELLO, "agent": "alice"}).status_code == 403
        for path in ("/metrics", "/requests", "/metrics?model=demo"):
            assert bob.get(path).status_code == 403, path
        assert bob.get("/props").json()["model_path"] == ""
        assert bob.post("/cache/clear", json={}).status_code == 403
    with httpx.Client(base_url=site.url, timeout=PATIENCE_S) as http:
        whole = http.get("/props", headers={"authorization": "Bearer sesame"}).json()
    assert whole["model_path"]


def test_a_body_that_is_no_json_is_told_by_the_default_member(http: httpx.Client) -> None:
    refused = http.post(ADDRESS, content=b"\xff" * 100)
    assert refused.status_code == 400 and "JSON" in refused.json()["error"]["message"]


def test_a_client_that_leaves_is_cancelled_at_the_member(site: Site) -> None:
    key = {"authorization": "Bearer sesame"}
    body = {**HELLO, "max_tokens": 900, "ignore_eos": True, "stream": True, "temperature": 0}
    with httpx.Client(base_url=site.url, timeout=PATIENCE_S, headers=key) as http:
        with http.stream("POST", ADDRESS, json=body) as answer:
            # Lines before are comments while the member starts.
            next(line for line in answer.iter_lines() if line.startswith("data: "))
        wait_until(lambda: not any(slot["is_processing"] for slot in http.get("/slots").json()))
