"""One streamed chat with the demo model, in which nothing runs but this chat."""

import json
from typing import Any

import httpx
import pytest

from mlxstack.core.preset import (
    Anticipation,
    ModelSpec,
    PrefixCacheSpec,
    Preset,
    SamplingSpec,
    ServerSpec,
    SlotSpec,
    Speculation,
)
from mlxstack.service.calls import background_tasks

INTERVALS = ("LOOK_S", "SWEEP_S", "SAMPLE_S", "REST_S")

PRESET = Preset(
    model=ModelSpec(id="demo"),
    slots=SlotSpec(count=1, n_ctx=2048),
    sampling=SamplingSpec(temperature=0, thinking=False),
    prefix_cache=PrefixCacheSpec(anticipate=Anticipation.OFF),
    server=ServerSpec(port=0),
    speculation=Speculation.OFF,
)
"""One slot, without drafts, whose number depends on speed, and without early turns: those of the
last answer may run while the next is counted."""


def let_intervals_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Periodic work, which no request causes, waits for an hour."""
    for name in INTERVALS:
        monkeypatch.setattr(background_tasks, name, 3600.0)


def stream(http: httpx.Client, path: str, **body: Any) -> str:
    """The text of a streamed answer, which ended well."""
    return "".join(delta.get("content") or "" for delta in deltas(http, path, **body))


def deltas(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """The deltas of a streamed answer, which ended well."""
    body = {"stream": True, "max_tokens": 12, **body}
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def user(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]
