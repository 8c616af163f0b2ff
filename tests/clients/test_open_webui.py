"""What Open WebUI 0.12.4 sends to an Ollama server, as recorded, with words of ours."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.api.running import Running
from tests.clients.agents import DONE, ECHO, N_CTX, SCRIPT, TASK, THOUGHT
from tests.clients.stage import playing
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.mlx, pytest.mark.net]

HEADERS = {"content-type": "application/json", "user-agent": "Python/3.11 aiohttp/3.14.5"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.\n        ",
            "parameters": {
                "properties": {
                    "command": {"description": "The command", "type": "string"},
                    "description": {"type": "string"},
                },
                "required": ["command"],
                "type": "object",
            },
        },
    }
]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with playing(tmp_path_factory.mktemp("webui"), SCRIPT, N_CTX) as stage:
        yield stage


@pytest.fixture
def http(live: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=live.url, headers=HEADERS, timeout=PATIENCE_S) as client:
        yield client


def streamed(http: httpx.Client, body: dict[str, Any]) -> list[Any]:
    """The lines of a streamed answer; the last one, and no other, is done."""
    answer = http.post("/api/chat", json={"model": "local-model", "stream": True, **body})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    return lines


def text(lines: list[Any], field: str = "content") -> str:
    return "".join(line["message"].get(field, "") for line in lines)


def test_its_lists_of_models_name_the_one_that_is_served(http: httpx.Client) -> None:
    for path in ("/api/tags", "/api/ps"):
        (model,) = http.get(path).json()["models"]
        assert model["model"] == model["name"] == "local-model"
    assert http.get("/api/version").json()["version"]
    about = http.post("/api/show", json={"model": "local-model"}).json()
    assert "tools" in about["capabilities"]


def test_a_tool_runs_and_its_result_is_answered(live: Running, http: httpx.Client) -> None:
    task = {"role": "user", "content": TASK.format("opencode")}
    first = streamed(http, {"messages": [task], "tools": TOOLS, "think": True})
    (call,) = [tool_call for line in first for tool_call in line["message"].get("tool_calls", ())]
    assert call["function"]["arguments"]["command"] == ECHO
    assert text(first, "thinking").strip() == THOUGHT
    # Open WebUI numbers the calls, and names them in the results.
    called = {"index": 0, "id": "call_1", "function": call["function"]}
    messages = [
        task,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [called],
            "thinking": text(first, "thinking"),
        },
        {"role": "tool", "content": "MARKER_42", "tool_call_id": "call_1"},
    ]
    second = streamed(http, {"messages": messages, "tools": TOOLS, "think": True, "options": {}})
    assert text(second).strip() == DONE
    assert second[-1]["done_reason"] == "stop"
    later, before = live.service.request_log.requests()[:2]
    assert later.n_cached >= before.n_prompt - 2, "more than the opened thought was lost"


def test_options_format_and_keep_alive_are_taken(http: httpx.Client) -> None:
    options = {
        "temperature": 0.2, "seed": 3, "stop": ["\n\n"], "reasoning_effort": "low", "top_k": 5,
        "num_ctx": 4096, "num_predict": 20,
    }  # fmt: skip
    messages = [{"role": "user", "content": "Hello"}]
    lines = streamed(http, {"messages": messages, "options": options, "keep_alive": "5m"})
    assert lines[-1]["eval_count"] <= 20
    title = {"model": "local-model", "messages": messages, "options": {"num_predict": 1000}}
    answer = http.post("/api/chat", json={**title, "stream": False}).json()
    assert answer["done"] and answer["message"]["content"]


def test_a_picture_is_refused_in_words_that_the_page_shows(http: httpx.Client) -> None:
    message = {"role": "user", "content": "Look", "images": ["iVBORw0KGgo="]}
    answer = http.post("/api/chat", json={"model": "local-model", "messages": [message]})
    assert answer.status_code == 400
    assert answer.json() == {"error": "image input is not supported by this model; send text"}
