"""Every key that llama-server was recorded to answer with is there, with the same type."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.requests import chunks

pytestmark = [pytest.mark.mlx, pytest.mark.net]

RECORDED = json.loads(Path(__file__).with_name("llama_server_bodies.json").read_text())

# What llama-server tells and we have no counterpart for.
ABSENT = {
    "models[].modified_at", "models[].size", "models[].digest", "models[].parameters",
    "models[].details", "data[].meta.vocab_type", "data[].meta.n_embd", "data[].meta.ftype",
}  # fmt: skip


def differences(theirs: Any, ours: Any, at: str = "") -> list[str]:
    """Paths of theirs that ours lacks or has with another JSON type; null fits anything."""
    if theirs is None or ours is None or at in ABSENT:
        return []
    if isinstance(theirs, bool) or not isinstance(theirs, int | float):
        if type(theirs) is not type(ours):
            return [f"{at}: {type(theirs).__name__} against {type(ours).__name__}"]
    elif isinstance(ours, bool) or not isinstance(ours, int | float):
        return [f"{at}: number against {type(ours).__name__}"]
    if isinstance(theirs, dict):
        inner = [(key, f"{at}.{key}".strip(".")) for key in theirs]
        missing = [path for key, path in inner if key not in ours and path not in ABSENT]
        both = [(key, path) for key, path in inner if key in ours]
        return missing + [x for k, path in both for x in differences(theirs[k], ours[k], path)]
    if isinstance(theirs, list) and theirs and ours:
        return differences(theirs[0], ours[0], f"{at}[]")
    return []


def prepare(http: httpx.Client) -> None:
    """Both slots have been used, and a file exists, as when the recording was made."""
    for slot in (0, 1):
        body = {"prompt": "hello world this is", "n_predict": 4, "id_slot": slot}
        http.post("/completion", json=body).raise_for_status()
    http.post("/slots/1?action=save", json={"filename": "s1.bin"}).raise_for_status()


@pytest.mark.parametrize("one", RECORDED, ids=lambda one: f"{one['method']} {one['path']}")
def test_recorded_body(http: httpx.Client, one: dict[str, Any]) -> None:
    prepare(http)
    if one["body"] and one["body"].get("stream"):
        found = chunks(http, one["path"], one["body"])
        assert differences(one["answer"][-1], found[-1]) == []
        assert (
            differences(one["answer"][0], found[0]) == [] or "prompt_progress" in one["answer"][0]
        )
        return
    answer = http.request(one["method"], one["path"], json=one["body"])
    # llama-server has no 405.
    is_wrong_method = one["method"] == "GET" and answer.status_code == 405
    assert is_wrong_method or answer.status_code == one["status"], answer.text
    if is_wrong_method:
        assert "POST" in answer.headers["allow"]
        return
    theirs = one["answer"]
    ours = answer.json()
    if one["path"].startswith("/slots") and one["method"] == "GET":
        theirs = theirs[-1:]
        ours = [slot for slot in ours if slot["id"] == 1]
    assert differences(theirs, ours) == []


def test_the_comparison_can_fail() -> None:
    assert differences({"a": 1, "b": {"c": [{"d": "x"}]}}, {"a": True, "b": {"c": [{}]}}) == [
        "a: number against bool",
        "b.c[].d",
    ]
