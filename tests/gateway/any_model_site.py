"""Twelve models of six types on a disk, and the gateway that `up --any-model` starts for them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from msgspec import Struct
from tokenizers import Tokenizer

from mlxstack.demo import MODEL_DIR
from mlxstack.gateway.spec import GatewaySpec
from mlxstack.host.home import Home
from mlxstack.host.services import read_json
from tests import forked, named_models
from tests.gateway.real_members import cards, kill_all
from tests.patience import PATIENCE_S
from tests.ports import unused_port

COMMAND = (sys.executable, "-m", "mlxstack.cli.main")
OWNER = "tiny"


class AnySite(Struct):
    """Address, words of the models by their names, and what ran `up`."""

    url: str
    word_of: dict[str, str]
    home: Home
    env: dict[str, str]
    output: str

    @property
    def spec(self) -> GatewaySpec:
        spec = read_json(self.home.gateway_file("gateway"), GatewaySpec)
        assert spec is not None
        return spec


def long_tokens() -> dict[int, str]:
    """Tokens that are words of four letters or more."""
    vocabulary = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).get_vocab()
    tokens = {n: text.strip("Ġ▁ ") for text, n in vocabulary.items()}
    return {n: text for n, text in sorted(tokens.items()) if text.isalpha() and len(text) > 3}


def write_models(folder: Path) -> dict[str, str]:
    """Two of each type, one in the hub's cache and one in LM Studio's folder; their words."""
    tokens = iter(long_tokens().items())
    word_of = {}
    for number, kind in enumerate((*named_models.KINDS, *named_models.KINDS)):
        token, word = next(tokens)
        name = f"{kind}-{number}"
        if number < len(named_models.KINDS):
            cached = folder / "hub" / f"models--{OWNER}--{name}"
            (cached / "refs").mkdir(parents=True)
            (cached / "refs" / "main").write_text("0" * 40)
            place = cached / "snapshots" / ("0" * 40)
        else:
            place = folder / "user" / ".lmstudio" / "models" / OWNER / name
        named_models.write(place, kind, token, number)
        word_of[f"{OWNER}/{name}"] = word
    return word_of


@contextmanager
def any_site(folder: Path, memory: str, keys: list[object]) -> Iterator[AnySite]:
    """The gateway as a person starts it; everything is ended at the end."""
    word_of = write_models(folder)
    port = unused_port()
    env = {
        **os.environ,
        "HOME": str(folder / "user"),
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "MLX_STACK_HOME": str(folder / "home"),
        "MLX_STACK_MEMORY": memory,
        "MLX_STACK_SERVER_API_KEYS": json.dumps(keys),
    }
    env.pop("MLX_STACK_WORKER", None)
    home = Home(folder / "home")
    with forked.preloaded(env):
        try:
            done = run(env, "up", "--any-model", "--port", str(port))
            assert done.returncode == 0, done.stdout + done.stderr
            yield AnySite(f"http://127.0.0.1:{port}", word_of, home, env, done.stdout + done.stderr)
        finally:
            run(env, "down")
            kill_all(home)


def run(env: dict[str, str], *args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *args], env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


class Talker:
    """Client with one conversation for each model, which it changes as in a menu."""

    def __init__(self, site: AnySite, name: str) -> None:
        self._site = site
        self._name = name
        self._said: dict[str, list[dict[str, str]]] = {}
        self.n_visits = 0

    def visit(self, model: str) -> int:
        """One turn with a model, which must answer with its word; the tokens it had in its KV."""
        turns = self._said.setdefault(model, [])
        turns.append({"role": "user", "content": f"I am {self._name}. " + "Hello! " * 60})
        body = {"model": model, "messages": turns, "max_tokens": 4, "temperature": 0}
        answer = httpx.post(
            self._site.url + "/v1/chat/completions",
            json=body,
            headers={"authorization": "Bearer sesame"},
            timeout=PATIENCE_S,
        )
        assert answer.status_code == 200, answer.text
        message = answer.json()["choices"][0]["message"]
        text = (message.get("reasoning_content") or "") + (message["content"] or "")
        assert text == 4 * self._site.word_of[model], (model, text)
        turns.append({"role": "assistant", "content": text})
        self.n_visits += 1
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert len(turns) == 2 or cached >= 128, (model, answer.json()["usage"])
        return int(cached)


def n_reserved(site: AnySite) -> int:
    """Bytes of the models that are in memory, or on their way in or out."""
    held = (card for card in cards(site.url).values() if card["status"] != {"value": "unloaded"})
    return sum(int(str(card["n_bytes"])) for card in held)


def n_loads(site: AnySite) -> dict[str, int]:
    """Times that each member was loaded, by its service."""
    key = {"authorization": "Bearer sesame"}
    text = httpx.get(site.url + "/metrics", headers=key, timeout=PATIENCE_S).text
    pairs = re.findall(r'mlxstack_gateway_loads_total\{member="(\S+)"\} (\d+)', text)
    return {name: int(n) for name, n in pairs}
