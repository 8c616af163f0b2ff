"""Asks a service for greedy answers of token ids, and counts what was compared."""

import collections
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from msgspec import Struct
from msgspec.structs import replace
from tokenizers import Tokenizer

from mlxstack.core.preset import ModelSpec, Preset, ServerSpec, SlotSpec
from tests.api.running import Running, running
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
SCRIPTS = (
    "Der Zug fährt über die Brücke. Поезд едет по мосту. 列车驶过大桥。電車が橋を渡る。 "
    "기차가 다리를 건넌다. "
    "القطار يعبر الجسر. 👩‍🚀🚆 𓀀𓂀 "
)
"""Emoji with a joiner, and hieroglyphs that are four byte tokens."""

COMPARED: collections.Counter[tuple[str, str, str]] = collections.Counter()
"""Answers by folder, path and `same` or `other`; printed at the end of the run."""

Ids = tuple[int, ...]


class Answer(Struct, frozen=True):
    """Generated tokens, and how many of the prompt were reused."""

    tokens: Ids
    n_cached: int


class Asker(Struct, frozen=True):
    """Client of a service of one real folder."""

    live: Running
    client: httpx.Client
    tokenizer: Tokenizer
    colds: dict[tuple[Ids, int], Ids]
    """Cold answers by prompt and number of tokens: nothing changes them."""

    def ids(self, text: str, n: int) -> Ids:
        """First `n` tokens of a text that is repeated as often as needed."""
        tokens: list[int] = []
        while len(tokens) < n:
            tokens += self.tokenizer.encode(text, add_special_tokens=not tokens).ids
        return tuple(tokens[:n])

    def answer(self, ids: Ids, n: int, **more: Any) -> Answer:
        """Greedy answer of exactly `n` tokens."""
        body = {"prompt": ids, "n_predict": n, "temperature": 0, "ignore_eos": True}
        body |= {"return_tokens": True, **more}
        reply = self.client.post("/completion", json=body).raise_for_status().json()
        return Answer(tuple(reply["tokens"]), reply["timings"]["cache_n"])

    def cold(self, ids: Ids, n: int) -> Ids:
        """The answer computed from nothing, once; nobody else may ask."""
        if (ids, n) not in self.colds:
            answer = self.answer(ids, n, cache_prompt=False)
            assert answer.n_cached == 0
            self.colds[ids, n] = answer.tokens
        return self.colds[ids, n]

    def together(self, prompts: Sequence[Ids], n: int) -> list[Answer]:
        """Answers of prompts that are sent at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda ids: self.answer(ids, n), prompts))


class Comparison(Struct, frozen=True):
    """Compares answers of a folder, and counts them by path."""

    folder: str

    def check(self, path: str, answers: Sequence[object], expected: Sequence[object]) -> list[bool]:
        """Whether each answer is the wanted one."""
        same = [answer == right for answer, right in zip(answers, expected, strict=True)]
        COMPARED[self.folder, path, "same"] += sum(same)
        COMPARED[self.folder, path, "other"] += len(same) - sum(same)
        return same


def texts() -> dict[str, str]:
    """Real texts: code, prose, several scripts."""
    code = (ROOT / "mlxstack" / "engine" / "loop.py").read_text("utf-8")
    prose = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    return {"code": code, "prose": prose, "scripts": SCRIPTS, "list": prose[4000:] + code[:4000]}


@contextmanager
def asking(folder: Path, home: Path, **sections: Any) -> Iterator[Asker]:
    """A service of four slots over a real folder; `sections` replace those of its preset."""
    plain = Preset(
        model=ModelSpec(id=str(folder), alias=folder.name),
        name=folder.name,
        slots=SlotSpec(count=4, n_ctx=4096),
        server=ServerSpec(port=0),
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with (
        running(replace(plain, **sections), home) as live,
        httpx.Client(base_url=live.url, timeout=PATIENCE_S) as client,
    ):
        yield Asker(live, client, tokenizer, {})
