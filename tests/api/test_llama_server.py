"""llama-server's own surface over HTTP, on a real engine."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlxstack.core.preset import MetricsSpec, PrefixCacheSpec
from mlxstack.host.log_lines import JSONFormatter, for_people, read
from tests.api.requests import PLAIN, chat, chat_body, chunks, frames, prompt_of
from tests.api.running import Running, running, tiny_preset
from tests.patience import PATIENCE_S, wait_until

pytestmark = [pytest.mark.mlx, pytest.mark.net]


def test_b11_props_say_slots_and_context(http: httpx.Client) -> None:
    found = http.get("/props").json()
    assert found["total_slots"] == 3
    assert found["default_generation_settings"]["n_ctx"] == 1024
    assert found["is_batching"] is True
    assert found["mlx_active_bytes"] > 0
    assert found["prevents_sleep"] is False
    assert found["why_not_preventing_sleep"] is None


def test_b12_slots_are_bare_until_used(http: httpx.Client) -> None:
    chat(http, id_slot=1)
    found = http.get("/slots").json()
    assert [slot["id"] for slot in found] == [0, 1, 2]
    assert "params" in found[1]
    assert found[1]["params"]["temperature"] == 0
    assert found[1]["n_tokens"] == found[1]["n_prompt_tokens"] > 8
    assert "params" not in found[0]


def test_b17_models_health_metrics(http: httpx.Client) -> None:
    assert http.get("/health").json() == http.get("/v1/health").json() == {"status": "ok"}
    listed = http.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert http.get("/v1/models/tiny").json() == listed["data"][0]
    other = http.get("/models/gpt-4o").json()
    assert other["id"] == "gpt-4o" and other["aliases"] == ["tiny"], "requests may give this name"
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert int(answer.headers["process-start-time-unix"]) > 1_600_000_000


def metric(http: httpx.Client, name: str) -> float:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return next(s.value for family in families for s in family.samples if s.name == name)


def test_h7_counters_count(http: httpx.Client) -> None:
    before = metric(http, "llamacpp:tokens_predicted_total")
    asked = metric(http, "mlxstack_requests_total")
    chat(http, max_tokens=5, ignore_eos=True)
    assert metric(http, "llamacpp:tokens_predicted_total") == before + 5
    assert metric(http, "mlxstack_requests_total") == asked + 1
    assert metric(http, "llamacpp:requests_processing") == 0


def test_h7_evictions_and_the_bytes_of_saves_and_restores_are_counted(http: httpx.Client) -> None:
    names = ("evictions", "saved_bytes", "restored_bytes")
    before = {name: metric(http, f"mlxstack_{name}_total") for name in names}
    chat(http, max_tokens=5, id_slot=0)
    saved = http.post("/slots/0?action=save", json={"filename": "counted.kv"}).json()
    restored = http.post("/slots/1?action=restore", json={"filename": "counted.kv"}).json()
    http.post("/cache/clear").raise_for_status()
    grown = {name: metric(http, f"mlxstack_{name}_total") - before[name] for name in names}
    assert grown["saved_bytes"] == saved["n_written"] > 0
    assert grown["restored_bytes"] == restored["n_read"] > 0
    assert grown["evictions"] > 0


def test_h7_kv_bytes_are_those_of_the_slots(http: httpx.Client) -> None:
    chat(http, id_slot=0)
    told = http.get("/metrics").text
    assert "# HELP mlxstack_kv_bytes Bytes of KV in slots, without parked KV\n" in told
    assert metric(http, "mlxstack_kv_bytes") == http.get("/slots").json()[0]["n_bytes"] > 0
    http.post("/slots/0?action=erase").raise_for_status()
    assert http.get("/cache").json()["memory_bytes"] > metric(http, "mlxstack_kv_bytes") == 0


def test_native_completion_stop_types(http: httpx.Client) -> None:
    body = {"prompt": "once upon a time", "n_predict": 30, "temperature": 0, "ignore_eos": True}
    whole = http.post("/completion", json=body).json()
    assert whole["stop_type"] == "limit"
    assert whole["tokens_predicted"] == 30
    assert whole["prompt"] == "once upon a time"
    word = whole["content"][6:9]
    stopped = http.post("/completions", json={**body, "stop": [word]}).json()
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    assert stopped["content"] == whole["content"][: whole["content"].index(word)]


def test_native_stream_adds_up(http: httpx.Client) -> None:
    body = {"prompt": "once upon a time", "n_predict": 12, "temperature": 0, "return_tokens": True}
    whole = http.post("/completion", json=body).json()
    found = chunks(http, "/completion", body)
    assert "".join(one["content"] for one in found) == whole["content"]
    assert [t for one in found for t in one["tokens"]] == whole["tokens"]
    assert [one["stop"] for one in found] == [False] * (len(found) - 1) + [True]
    assert "[DONE]" not in frames(http, "/completion", body)


def test_native_prompt_of_tokens_is_that_of_text(http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"content": "once upon a time"}).json()["tokens"]
    body = {"n_predict": 6, "temperature": 0}
    by_text = http.post("/completion", json={**body, "prompt": "once upon a time"}).json()
    by_tokens = http.post("/completion", json={**body, "prompt": tokens}).json()
    assert by_tokens["content"] == by_text["content"]
    assert by_tokens["tokens_evaluated"] == len(tokens)
    assert by_tokens["timings"]["cache_n"] == len(tokens)


def test_tokens_survive_the_way_there_and_back(http: httpx.Client) -> None:
    text = "<|im_start|>user\nhé 🙂<|im_end|>"
    tokens = http.post("/tokenize", json={"content": text}).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["content"] == text
    pieces = http.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    data = b"".join(
        bytes(one["piece"]) if isinstance(one["piece"], list) else one["piece"].encode()
        for one in pieces
    )
    assert data.decode() == text
    literal = http.post("/tokenize", json={"content": text, "parse_special": False}).json()
    assert len(literal["tokens"]) > len(tokens)


def test_vllms_bodies_are_tokenized(http: httpx.Client) -> None:
    text = "<|im_start|>hé"
    chat = {"messages": [{"role": "user", "content": "hé"}]}
    by_content = http.post("/tokenize", json={"content": text, "add_special": True}).json()
    by_prompt = http.post("/tokenize", json={"model": "any", "prompt": text}).json()
    assert by_prompt == by_content
    bare = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert bare == http.post("/tokenize", json={"content": text}).json()
    of_chat = http.post("/tokenize", json=chat).json()
    assert of_chat["count"] == len(of_chat["tokens"])
    counted = http.post("/v1/chat/completions/input_tokens", json=chat).json()["input_tokens"]
    assert of_chat["count"] == counted > 1
    slots = http.get("/slots").json()
    assert of_chat["max_model_len"] == slots[0]["n_ctx"]
    text = http.post("/apply-template", json=chat).json()["prompt"]
    assert http.post("/tokenize", json={"content": text}).json()["tokens"] == of_chat["tokens"]


@pytest.mark.parametrize(
    ("path", "field"),
    [("/completion", "prompt"), ("/detokenize", "tokens"), ("/cache/warm", "tokens")],
)
def test_more_tokens_than_a_slot_holds_are_too_long(
    http: httpx.Client, path: str, field: str
) -> None:
    answer = http.post(path, json={field: [10**9] * 5000})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "exceed_context_size_error"
    assert "5000 tokens" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/cache/warm", "/cache/prefixes"])
def test_a_text_that_fits_no_slot_is_not_computed(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json={"name": "long", "text": "beta " * 5000})
    assert answer.status_code == 400
    assert "a slot holds" in answer.json()["error"]["message"]


def test_tokens_and_pieces_are_looked_up_beside_the_loop(
    live: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()

    def noted(work: Callable[..., Any]) -> Callable[..., Any]:
        def post(*given: Any) -> Any:
            threads.add(threading.current_thread().name)
            return work(*given)

        return post

    prompt_maker = live.service.text_processor.prompt_maker
    monkeypatch.setattr(prompt_maker, "piece", noted(prompt_maker.piece))
    monkeypatch.setattr(prompt_maker, "detokenize", noted(prompt_maker.detokenize))
    body = {"content": "once upon a time", "with_pieces": True}
    found = httpx.post(f"{live.url}/tokenize", json=body).json()["tokens"]
    ids = [one["id"] for one in found]
    httpx.post(f"{live.url}/detokenize", json={"tokens": ids}).raise_for_status()
    assert threads
    assert all(name.startswith("prompts") for name in threads)


def test_c1_c2_save_restore_and_continue(http: httpx.Client) -> None:
    text = prompt_of(100)
    first = chat(http, text, id_slot=0)
    saved = http.post("/slots/0?action=save", json={"filename": "c1.bin"}).json()
    listed = http.get("/slots").json()[0]
    assert saved["n_saved"] == listed["n_tokens"]
    assert saved["timings"]["save_ms"] >= 0
    for slot in range(3):
        assert http.post(f"/slots/{slot}?action=erase").status_code == 200
    restored = http.post("/slots/2?action=restore", json={"filename": "c1.bin"}).json()
    assert restored["n_restored"] == saved["n_saved"]
    assert restored["n_read"] == saved["n_bytes"]
    again = http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": text}], "max_tokens": 8, **PLAIN},
    )
    assert again.headers["x-mlx-stack-slot"] == "2"
    assert again.json()["choices"] == first["choices"]
    assert again.json()["timings"]["prompt_n"] == 1


def test_c7_a_missing_file_is_harmless(http: httpx.Client) -> None:
    chat(http, prompt_of(50), id_slot=0)
    before = http.get("/slots").json()[0]["n_tokens"]
    answer = http.post("/slots/0?action=restore", json={"filename": "none.bin"})
    assert answer.status_code == 404
    assert http.get("/slots").json()[0]["n_tokens"] == before


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a\0b", "x" * 256, "..", "", "a\\b", " a"])
def test_c9_bad_file_names(http: httpx.Client, name: str) -> None:
    answer = http.post("/slots/0?action=save", json={"filename": name})
    assert answer.status_code == 400
    assert "Invalid filename" in answer.json()["error"]["message"]


def test_a_save_replaces_no_file_of_another_kind(model_folder: Path, tmp_path: Path) -> None:
    body = {"filename": "thesis.txt"}
    with (
        running(tiny_preset(model_folder), tmp_path) as here,
        httpx.Client(base_url=here.url, timeout=PATIENCE_S) as http,
    ):
        chat(http, max_tokens=5, id_slot=0)
        for _ in range(2):
            http.post("/slots/0?action=save", json=body).raise_for_status()
        (path,) = tmp_path.rglob("thesis.txt")
        path.write_text("my thesis")
        refused = http.post("/slots/0?action=save", json=body)
    assert refused.status_code == 409, refused.text
    assert "thesis.txt is not a slot file" in refused.json()["error"]["message"]
    assert path.read_text() == "my thesis"


def test_c12_erase_forgets(http: httpx.Client) -> None:
    chat(http, prompt_of(60, seed=912), id_slot=0)
    held = http.get("/slots").json()[0]["n_tokens"]
    assert http.post("/slots/0?action=erase").json() == {"id_slot": 0, "n_erased": held}
    cached = chat(http, prompt_of(60, seed=912), id_slot=0)["usage"]["prompt_tokens_details"]
    assert cached["cached_tokens"] == 0


def test_x4_somebody_is_there(live: Running) -> None:
    for path in ("/", "/api/hello"):
        assert httpx.head(live.url + path).status_code == 200
    unknown = httpx.head(live.url + "/nope")
    assert (unknown.status_code, unknown.content) == (404, b"")


def test_h8_a_log_line_names_the_request_and_says_nothing_of_its_text(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mlxstack"):
        body = chat_body("a very secret word", id_slot=0, agent="me")
        answer = http.post("/v1/chat/completions", json=body)
    [record] = [r for r in caplog.records if r.name == "mlxstack.requests"]
    text = JSONFormatter().format(record)
    line = read(text)
    n_prompt = answer.json()["usage"]["prompt_tokens"]
    assert f" me  {n_prompt} tokens, 0% reused, " in for_people(line)
    expected = {
        "request": answer.headers["x-request-id"], "id": answer.json()["id"], "agent": "me",
        "slot": 0, "priority": "normal", "prompt": n_prompt, "cached": 0,
    }  # fmt: skip
    assert {name: line.fields[name] for name in expected} == expected
    assert line.fields["ttft_ms"] >= line.fields["queued_ms"] >= 0
    assert "secret" not in text


def test_d11_h8_a_summary_line_comes_at_every_interval(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = PrefixCacheSpec(metrics=MetricsSpec(log_interval=0.2))
    preset = tiny_preset(model_folder, prefix_cache=spec)

    def lines() -> list[str]:
        told = (record.getMessage() for record in caplog.records)
        return [line for line in told if line.startswith("requests=")]

    began = time.monotonic()
    with caplog.at_level(logging.INFO, "mlxstack.tasks"), running(preset, tmp_path):
        wait_until(lambda: len(lines()) >= 3)
    assert len(lines()) <= (time.monotonic() - began) / 0.2
