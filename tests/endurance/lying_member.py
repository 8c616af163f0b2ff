"""A member of a gateway whose answers are false: `python -m tests.endurance.lying_member`.

The gateway passes on what is HTTP, says in words what is not, takes no flood into memory, keeps
nothing under way, and answers truly as soon as the member does.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import httpx
import psutil
from msgspec import Struct

from mlxstack.core.preset import ServerSpec
from tests import models
from tests.api.requests import chat_body
from tests.api.running import running, tiny_preset
from tests.endurance.bad_wire import Liar, Lie
from tests.endurance.lies import answers, body, fields, flood
from tests.gateway.gateway_thread import behind, in_front
from tests.patience import PATIENCE_S, wait_until

CHAT = "POST /v1/chat/completions"
HEALTH = "GET /health"
MODELS = "GET /v1/models"
PATH = "/v1/chat/completions"
MAX_GROWTH = 256 << 20
"""Bytes that the process may grow by while floods of 512 MiB pass."""

LIES: Mapping[str, Lie] = {
    "chat: no JSON": body(CHAT, lambda data: b"<html>"),
    "chat: half of it": body(CHAT, lambda data: data[: len(data) // 2]),
    "chat: less than announced": body(CHAT, lambda data: data, length=100_000),
    "chat: nothing": body(CHAT, lambda data: b""),
    "chat: a flood": flood(CHAT, b'{"choices":'),
    "chat: a flood as an error": flood(CHAT, status=500),
    "chat: elsewhere": answers(CHAT, 302, b"", location="http://127.0.0.1:1/"),
    "chat: a status of no kind": answers(CHAT, 799, b"{}"),
    "chat: a key is wanted": answers(CHAT, 401, b"{}", www_authenticate="Basic"),
    "chat: a cookie": answers(CHAT, 200, b"{}", set_cookie="a=b"),
    "chat: another encoding": answers(CHAT, 200, b"zip", content_encoding="gzip"),
    "chat: an upgrade": answers(CHAT, 200, b"{}", upgrade="websocket", connection="upgrade"),
    "chat: a header of 100,000 bytes": answers(CHAT, 200, b"{}", x_long="x" * 100_000),
    "health: another status": answers(HEALTH, 500, b"no"),
    "health: no JSON": body(HEALTH, lambda data: b"yes"),
    "health: a flood": flood(HEALTH, b"{"),
    "health: an odd word": fields(HEALTH, status=7, model={"a": 1}),
    "models: no JSON": body(MODELS, lambda data: b"[]"),
    "models: a flood": flood(MODELS, b'{"data":['),
    "models: other types": fields(MODELS, data=[{"id": 7}, None, "x"]),
    "models: somebody else's": fields(MODELS, data=[{"id": "gpt-5", "object": "model"}]),
}


class MemberOutcome(Struct, frozen=True):
    """Lies that were told, answers compared after them, and bytes that the process grew by."""

    n_lies: int
    n_compared: int
    n_bytes: int


def lying_member(root: Path, names: frozenset[str] = frozenset()) -> MemberOutcome:
    """Tell each lie, or those of these names. Raises AssertionError."""
    model = models.write(root / "tiny", {**models.LLAMA, "vocab_size": 1024})
    server = ServerSpec(port=0)
    preset = tiny_preset(model, server=behind(server))
    n_lies = n_compared = 0
    with running(preset, root / "home") as live, Liar(live.url, {}).serving() as liar:
        name = live.service.name
        with (
            in_front(server, liar.url, name, root / "front") as front,
            httpx.Client(base_url=front.url, timeout=PATIENCE_S) as http,
        ):
            expected = _said(http)
            before = psutil.Process().memory_info().rss
            for lie_name, lie in LIES.items():
                if names and lie_name not in names:
                    continue
                liar.lie = lie
                for path, content in ((PATH, chat_body(max_tokens=4, temperature=0)), *READ):
                    _check(http, path, content, lie_name)
                liar.lie = None
                wait_until(lambda: front.member.n_active == 0, f"{lie_name}: a request is inside")
                assert _said(http) == expected, lie_name
                n_lies += 1
                n_compared += 1
            n_bytes = psutil.Process().memory_info().rss - before
            assert n_bytes < MAX_GROWTH, f"the process grew by {n_bytes >> 20} MiB"
    return MemberOutcome(n_lies, n_compared, n_bytes)


READ = (("/v1/models", None), ("/health", None), ("/v1/agents", None))


def _check(http: httpx.Client, path: str, content: object, lie: str) -> None:
    """The gateway answers, or ends the connection of a body that is not whole."""
    method = "GET" if content is None else "POST"
    try:
        with http.stream(method, path, json=content) as answer:
            status = answer.status_code
            n_bytes = 0
            for part in answer.iter_raw():
                n_bytes += len(part)
    except (httpx.RemoteProtocolError, httpx.ReadError):
        return
    assert 200 <= status < 600 or status == 799, f"{lie}: {path} {status}"


def _said(http: httpx.Client) -> object:
    """A greedy answer; asked again while the gateway looks for its member."""
    messages: list[object] = []

    def is_answered() -> bool:
        answer = http.post(PATH, json=chat_body(max_tokens=4, temperature=0))
        if answer.status_code == 200:
            messages.append(answer.json()["choices"][0]["message"])
        return answer.status_code == 200

    wait_until(is_answered, "the member answers truly, and the gateway does not")
    return messages[-1]


if __name__ == "__main__":
    print(lying_member(Path(tempfile.mkdtemp(prefix="lying-")), frozenset(sys.argv[1:])))
