"""Greedy answers of a busy service against those from cold: `python -m tests.endurance.fidelity`.

Random conversations over HTTP with pictures, forks, rewinds, several choices, loops of tools,
thoughts, grammars, answers that end by themselves, pauses, stop words, agents and salts, on a
service with drafts and early turns, while it changes between two presets of its model, is restarted
and killed. An answer whose prompt replays none is
compared with that of a service with one slot and nothing kept, any other one with the same service
without its cache. A run that did not exercise each of `EXERCISED` fails.
"""

import argparse
import collections
import itertools
import json
import re
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.preset import (
    Anticipation,
    ModelSpec,
    PrefixCacheSpec,
    Preset,
    SlotSpec,
    Speculation,
)
from mlxstack.demo import MODEL_DIR
from mlxstack.service.service import LEAVING
from tests import models, vision_models
from tests.endurance.talks import Talks, has_picture
from tests.endurance.worker import WAIT_S, Worker

WITHOUT_PICTURES = {"sliding": models.SLIDING, "hybrid": models.HYBRID}
WITH_PICTURES = ("qwen3_vl", "qwen3_5", "gemma4", "mistral3")
KINDS = ("demo", *WITHOUT_PICTURES, *WITH_PICTURES)
N_CLIENTS = 4
N_CTX = 4096
SWAP_EVERY_S = 20.0
RESTART_EVERY_S = 90.0
LOOK_EVERY_S = 0.5
REPLAYED = "x-mlx-stack-replayed"
BEGUN_EARLY = "x-mlx-stack-begun-early"
CALM = {200, 409, 503, 529}
"""Statuses of a sound request: answered, an agent is busy, a model or worker is being changed."""

EARLY_CODES = {"overloaded": 503}
"""Statuses of the codes in bodies of the chat dialect."""
COUNTERS = {
    "mlxstack_early_tokens_used_total": "tokens of early prefill used",
    "llamacpp:spec_decode_num_accepted_tokens_total": "draft tokens accepted",
}
EXERCISED = (
    "compared from cold", "compared without its cache", "choices of n > 1", "forks", "tool calls",
    "thoughts", "grammars", "tokens reused", "ended by themselves", "with pictures",
    "with pictures, begun early", "swaps 200", "SIGTERM", "SIGKILL",
    *COUNTERS.values(),
)  # fmt: skip
"""Counts that a long run must have."""

Body = dict[str, Any]


class Outcome(Struct, frozen=True):
    """Counts of a run, and a description of each difference."""

    counts: dict[str, int]
    differences: tuple[str, ...]


class Differ:
    """Asks both services, and counts. Callable by any thread."""

    def __init__(self, hot: Worker, cold: Worker) -> None:
        self._hot = hot
        self._cold = cold
        self._lock = threading.Lock()
        self.counts: collections.Counter[str] = collections.Counter()
        self.differences: list[str] = []

    def note(self, name: str, n: int = 1) -> None:
        with self._lock:
            self.counts[name] += n

    def ask(self, client: httpx.Client, body: Body, extras: Body) -> Body | None:
        """First choice of the hot service; `extras` are no matter of the answer."""
        answer = self._post(client, self._hot, {**body, **extras})
        if answer is None:
            return None
        reply = answer.json()
        self.note("tokens reused", reply["usage"]["prompt_tokens_details"]["cached_tokens"])
        self._count(body, extras, reply["choices"][0])
        if has_picture(body):
            self.note("with pictures")
            self.note("with pictures, begun early", int(BEGUN_EARLY in answer.headers))
        if REPLAYED in answer.headers:
            again = {**body, **extras, "n": 1, "cache_prompt": False}
            self._compare("without its cache", body, answer, self._post(client, self._hot, again))
        else:
            fresh = {**body, "cache_salt": uuid.uuid4().hex}
            self._compare("from cold", body, answer, self._post(client, self._cold, fresh))
        return dict(answer.json()["choices"][0]["message"])

    def _count(self, body: Body, extras: Body, choice: Body) -> None:
        message = choice["message"]
        self.note("ended by themselves", int(choice["finish_reason"] == "stop"))
        self.note("tool calls", len(message.get("tool_calls") or []))
        self.note("thoughts", int(bool(message.get("reasoning_content"))))
        self.note("grammars", int("response_format" in body))
        self.note("choices of n > 1", int(extras.get("n", 1) > 1))

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Count what ends a client."""
        try:
            yield
        except Exception as error:
            self.fail(repr(error))
            raise

    def fail(self, description: str) -> None:
        """Count a fault of the service that no request shows."""
        self._differ(description, {})

    def _post(self, client: httpx.Client, worker: Worker, body: Body) -> httpx.Response | None:
        try:
            answer = client.post(f"{worker.url}/v1/chat/completions", json=body)
        except httpx.HTTPError as error:
            self.note(type(error).__name__)
            return None
        status = _status_of(answer)
        if status == 200:
            return answer
        self.note(f"status {status}")
        if status not in CALM and not _is_refused(answer):
            self._differ(f"status {status}: {answer.text[:300]}", body)
        return None

    def _compare(
        self, name: str, body: Body, answer: httpx.Response, repeated: httpx.Response | None
    ) -> None:
        if repeated is None:
            return
        if answer.headers.get(REPLAYED) != repeated.headers.get(REPLAYED):
            # Answers were forgotten in between, as in a change of the model.
            self.note("other memory")
            return
        self.note(f"compared {name}")
        expected = repeated.json()
        reply = answer.json()
        first = _said(expected["choices"][0])
        counts = [answered["usage"]["prompt_tokens"] for answered in (reply, expected)]
        for choice in reply["choices"]:
            if _said(choice) != first or counts[0] != counts[1]:
                description = (
                    f"{name}: {counts}\n  {_said(choice)}\n  {first}\n  {dict(answer.headers)}"
                )
                self._differ(description, body)

    def _differ(self, description: str, body: Body) -> None:
        with self._lock:
            self.counts["DIFFERENT"] += 1
            self.differences.append(f"{description}\n  {json.dumps(body)}")


class Counters:
    """Counters of the hot service over its restarts, and whether prefixes were shared live."""

    def __init__(self, differ: Differ, url: str) -> None:
        self._differ = differ
        self._url = url
        self._last: dict[str, int] = {}

    def look(self) -> None:
        """Add the growth since the last look; a service that is away is skipped."""
        try:
            text = httpx.get(f"{self._url}/metrics", timeout=WAIT_S).text
        except httpx.HTTPError:
            return
        for name, expected in COUNTERS.items():
            match = re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
            if match is None:
                continue
            now = int(float(match[1]))
            before = self._last.get(name, 0)
            self._differ.note(expected, now - before if now >= before else now)
            self._last[name] = now


def _status_of(answer: httpx.Response) -> int:
    """Status of an answer, or of the error in a body whose head was sent early."""
    if answer.status_code != 200 or "error" not in (body := answer.json()):
        return answer.status_code
    if LEAVING in body["error"]["message"]:
        return 503
    code = body["error"].get("code")
    return code if isinstance(code, int) else EARLY_CODES.get(code, 500)


def _is_refused(answer: httpx.Response) -> bool:
    """Whether a prompt was too long."""
    return answer.status_code == 400 and "n_ctx" in answer.text


def _said(choice: Body) -> tuple[Any, ...]:
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return (
        choice["finish_reason"],
        message.get("content"),
        message.get("reasoning_content"),
        [(call["name"], call["arguments"]) for call in calls],
    )


def fidelity(root: Path, kind: str, seconds: float, seed: int, n_least: int = 0) -> Outcome:
    """Run for `seconds`, and until `n_least` answers are compared."""
    model = ModelSpec(id=_model(root, kind), alias="model")
    hot = Worker(root / "hot", _hot_preset(model, 3), "tests.endurance.eager_worker")
    for name, n_slots in (("one", 3), ("two", 2)):
        text = msgspec.yaml.encode(replace(_hot_preset(model, n_slots), name=name))
        (hot.home / "presets" / f"{name}.yaml").write_bytes(text)
    cold = Worker(root / "cold", _cold_preset(model))
    differ = Differ(hot, cold)
    end = time.monotonic() + seconds
    sees = kind not in WITHOUT_PICTURES
    randoms = [Random(seed * 100 + n) for n in range(N_CLIENTS)]
    talkers = [(random, Talks(random, has_pictures=sees)) for random in randoms]
    try:
        hot.start()
        cold.start()
        clients = [
            threading.Thread(target=_converse, args=(differ, *talker, end, n_least))
            for talker in talkers
        ]
        for thread in clients:
            thread.start()
        _disturb(differ, hot, Random(seed), clients)
        for thread in clients:
            thread.join()
    finally:
        hot.end()
        cold.end()
    return Outcome(dict(sorted(differ.counts.items())), tuple(differ.differences))


def _converse(differ: Differ, random: Random, talks: Talks, end: float, n_least: int) -> None:
    """One client with several conversations."""
    with differ.failing(), httpx.Client(timeout=WAIT_S) as client:
        while time.monotonic() < end or _n_compared(differ) < n_least:
            body, extras = talks.next_request()
            differ.note("forks", int(talks.is_forked))
            message = differ.ask(client, body, extras)
            if message is not None:
                talks.go_on(message)
            talks.is_same = message is not None and random.random() < 0.3
            if message is None or talks.is_same:
                # A pause, in which an early turn begins or the service comes back.
                time.sleep(0.5)


def _n_compared(differ: Differ) -> int:
    return sum(n for name, n in differ.counts.items() if name.startswith("compared"))


def _disturb(differ: Differ, hot: Worker, random: Random, clients: list[threading.Thread]) -> None:
    """Change the preset, restart and kill while any client asks."""
    began = time.monotonic()
    next_swap = began + SWAP_EVERY_S
    next_restart = began + RESTART_EVERY_S
    presets = itertools.cycle(("two", "one"))
    counters = Counters(differ, hot.url)
    while any(thread.is_alive() for thread in clients):
        time.sleep(LOOK_EVERY_S)
        counters.look()
        if time.monotonic() > next_restart:
            number = random.choice([signal.SIGTERM, signal.SIGKILL])
            hot.end(number)
            hot.start()
            differ.note(number.name)
            next_restart = time.monotonic() + RESTART_EVERY_S
        elif time.monotonic() > next_swap:
            body = {"preset": next(presets), "drain_s": random.choice([0, 2])}
            try:
                done = httpx.post(f"{hot.url}/v1/models/load", json=body, timeout=WAIT_S)
                differ.note(f"swaps {done.status_code}")
            except httpx.TimeoutException:
                differ.fail(f"a swap did not end within {WAIT_S:g} s")
            next_swap = time.monotonic() + SWAP_EVERY_S


def _model(root: Path, kind: str) -> str:
    if kind == "demo":
        return str(MODEL_DIR)
    if kind in WITH_PICTURES:
        return str(vision_models.build(root / kind, kind))
    return str(models.write(root / kind, {**WITHOUT_PICTURES[kind], "vocab_size": 1024}))


def _hot_preset(model: ModelSpec, n_slots: int) -> Preset:
    return Preset(
        model=model,
        name="one",
        slots=SlotSpec(count=n_slots, n_ctx=N_CTX),
        speculation=Speculation.AUTO,
        prefix_cache=PrefixCacheSpec(anticipate=Anticipation.AUTO),
    )


def _cold_preset(model: ModelSpec) -> Preset:
    return Preset(
        model=model,
        name="cold",
        slots=SlotSpec(count=1, n_ctx=N_CTX),
        prefix_cache=PrefixCacheSpec(enabled=False, anticipate=Anticipation.OFF),
    )


def main() -> int:
    """Print counts and differences; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all models together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=KINDS, default=KINDS)
    args = parser.parse_args()
    n_different = 0
    counts: collections.Counter[str] = collections.Counter()
    for kind in args.models:
        root = Path(tempfile.mkdtemp(prefix=f"fidelity-{kind}-"))
        seconds = 60 * args.minutes / len(args.models)
        outcome = fidelity(root, kind, seconds, args.seed)
        print(kind, outcome.counts, flush=True)
        counts.update(outcome.counts)
        for difference in outcome.differences:
            print(difference, flush=True)
        n_different += len(outcome.differences)
    print("sums:", dict(sorted(counts.items())), flush=True)
    missing = [name for name in EXERCISED if not counts[name]]
    if missing:
        print(f"not exercised: {', '.join(missing)}", flush=True)
    print(f"{n_different} differences", flush=True)
    return int(n_different > 0 or bool(missing))


if __name__ == "__main__":
    raise SystemExit(main())
