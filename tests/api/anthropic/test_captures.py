"""Real requests of real clients, where somebody has recorded them.

Recordings hold their vendors' words, so that none is part of this repository. Point
MLX_STACK_CAPTURES at a folder of files `claude-code-*.json`, each a list of requests with
`method`, `path`, `headers` and `body`; long texts may be left out as `<name:LENGTH>`.
"""

import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import structs

from mlxstack.api.anthropic.bodies import MessagesBody
from mlxstack.api.anthropic.convert import conversation
from mlxstack.core.preset import SlotSpec
from tests import models
from tests.api.anthropic.speaking import events, in_order, n_prompt
from tests.api.running import TINY, Running, running, tiny_preset

FOLDER = os.environ.get("MLX_STACK_CAPTURES")
FILES = sorted(Path(FOLDER).glob("claude-code-*.json")) if FOLDER else []
LEFT_OUT = re.compile(r"<(?P<name>str|description|input_schema):(?P<length>\d+)B?>(?P<rest>.*)")
N_CTX = 65536
NARROW = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": N_CTX,
}
WORDS = ("the", "a", "of", "to", "and", "in", "is", "you", "that", "it", "for", "was", "on", "are")

pytestmark = [
    pytest.mark.mlx,
    pytest.mark.net,
    pytest.mark.slow,
    pytest.mark.skipif(not FILES, reason="MLX_STACK_CAPTURES names no folder with recordings"),
]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A tiny model with the context of a large one."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    models.write(folder, {**TINY, **NARROW})
    preset = structs.replace(tiny_preset(folder), slots=SlotSpec(count=3, n_ctx=N_CTX))
    with running(preset, tmp_path_factory.mktemp("home")) as found:
        yield found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_recorded_requests_are_accepted_and_cached(wide: Running, file: Path) -> None:
    """Whatever goes on from an earlier request reads 99 % of its prompt from the cache."""
    heard: list[tuple[tuple[Any, ...], int]] = []
    n_followed = 0
    with httpx.Client(base_url=wide.url, timeout=600) as http:
        for recorded in json.loads(file.read_text()):
            path, body = recorded["path"], inflated(recorded["body"], file.stem)
            if recorded["method"] != "POST" or "count_tokens" in path:
                sent = http.request(recorded["method"], path, json=body)
                assert sent.status_code == 200, sent.text
                continue
            body |= {"max_tokens": 2}
            usage = talk(http, path, body, recorded["headers"])
            told = meaning(body)
            for earlier, n_earlier in heard:
                if told[: len(earlier)] == earlier:
                    n_followed += 1
                    assert usage["cache_read_input_tokens"] >= 0.99 * n_earlier
            heard.append((told, n_prompt(usage)))
    assert n_followed or len(heard) < 2


def talk(http: httpx.Client, path: str, body: Any, headers: dict[str, str]) -> dict[str, int]:
    """The usage of one answer, streamed or not."""
    named = {k: v for k, v in headers.items() if k.lower().startswith(("x-claude", "anthropic"))}
    answer = http.post(path, json=body, headers=named)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return dict(answer.json()["usage"])
    found = events(answer.text)
    in_order(found)
    return dict(found[-2]["usage"])


def meaning(body: Any) -> tuple[Any, ...]:
    """What a request says, without its clothes: the head, and then each turn."""
    found = conversation(msgspec.convert(body, MessagesBody))
    head = tuple(tool.name for tool in found.tools if not tool.is_deferred)
    return (head, found.thinking, *found.messages)


def inflated(value: Any, owner: str) -> Any:
    """Texts that were left out, as words of our own of about the same length."""
    match value:
        case dict():
            owner += str(value.get("name", ""))
            return {key: inflated(one, owner) for key, one in value.items()}
        case list():
            return [inflated(one, owner) for one in value]
        case str() if left := LEFT_OUT.fullmatch(value):
            return filler(left, owner)
        case str() if "\n" in value and (left := LEFT_OUT.match(value)):
            return filler(left, owner)
    return value


def filler(left: re.Match[str], owner: str) -> Any:
    """The same words for the same place, others for another."""
    n_chars = int(left["length"])
    chance = random.Random(left["rest"] + owner + left["length"])
    words = " ".join(chance.choices(WORDS, k=n_chars // 3))[:n_chars]
    if left["name"] != "input_schema":
        return words
    return {"type": "object", "properties": {"a": {"type": "string", "description": words}}}
