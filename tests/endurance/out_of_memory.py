"""The worker's memory runs out: `python -m tests.endurance.out_of_memory`.

Allocations fail under a limit of the kernel in the middle of long prompts, and SIGKILL, as the
kernel chooses a process to end, comes in prefill, decode, save and restore. Whoever waits gets an
answer, an error or the end of a connection; the supervisor starts another worker, which answers as
the first, knows agents and slot files, and whose `status` names the end of the last one.
"""

import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil
from msgspec import Struct

from mlxstack.demo import MODEL_DIR
from tests.endurance.revivals import WAIT_S, House
from tests.endurance.talkers import Messages, answer
from tests.patience import PATIENCE_S

N_AGENTS = 3
N_LONG = 3
N_SHORT = 2
"""Prompts at once, under the numbers below 0 and from 0 on."""
FILE = "kept.kv"
UNLIMITED = -1
MIB = 1 << 20
ROOMS_MIB = (0, 8, 24, 64, 128) if hasattr(psutil, "RLIMIT_AS") else ()
"""Memory that a limit leaves beyond what the worker has mapped, where the kernel keeps limits."""
CAUSES = ("SIGKILL, as when memory runs out", "native code failed, as when memory runs out")
"""Words of `status` about a worker that ended so."""
MARGIN_S = 0.03
"""Seconds within which a kill comes after the request that it is to hit."""


class Shortage(Struct, frozen=True):
    """Rounds with a limit, by MiB of room, and kills in each phase."""

    rooms_mib: tuple[int, ...] = ROOMS_MIB * 2
    n_kills: int = 5


class ShortageOutcome(Struct, frozen=True):
    """Workers that ended for a limit, and those that went on; requests by what they got.

    `n_compared`: greedy answers that were those of before.
    """

    n_ended: int
    n_survived: int
    n_kills: int
    n_answered: int
    n_errors: int
    n_cut: int
    n_compared: int


class ShortageRun:
    """A supervised service, what it answered before, and counts. Single owner."""

    def __init__(self, root: Path, shortage: Shortage, seed: int) -> None:
        self._shortage = shortage
        self._random = Random(seed)
        n_deaths = len(shortage.rooms_mib) + len(PHASES) * shortage.n_kills + 1
        self.house = House(MODEL_DIR, root, n_deaths)
        self.http = httpx.Client(base_url=self.house.url, timeout=WAIT_S)
        self._agents: dict[str, Messages] = {}
        self._expected: dict[int, str] = {}
        self._counts = dict.fromkeys(ShortageOutcome.__struct_fields__, 0)
        self._lock = threading.Lock()

    def run(self) -> ShortageOutcome:
        """All rounds. Raises AssertionError."""
        self.house.start()
        try:
            self._prepare()
            for room_mib in self._shortage.rooms_mib:
                self._limit(room_mib)
            for phase in PHASES:
                for _ in range(self._shortage.n_kills):
                    self._kill(phase)
        finally:
            self.house.end()
            self.http.close()
        return ShortageOutcome(**self._counts)

    def _prepare(self) -> None:
        """Agents on disk, a slot file, and the answers to expect."""
        for number in range(N_AGENTS):
            messages: Messages = ({"role": "user", "content": f"I am agent {number}. " * 20},)
            self._agents[f"agent-{number}"] = messages
            answer(self.http, f"agent-{number}", messages)
        self.house.until(lambda: all(map(self.house.is_on_disk, self._agents)))
        self.house.until(self._save)
        for number in range(-N_LONG, N_SHORT):
            self._expected[number] = _text(self.http, number)

    def _save(self) -> bool:
        return self.http.post("/slots/0?action=save", json={"filename": FILE}).is_success

    def _limit(self, room_mib: int) -> None:
        """Send long prompts, and short ones, to a worker that gets no more memory."""
        worker = self._worker()
        n_crashes = self.house.state().n_crashes
        limit = worker.memory_info().vms + room_mib * MIB
        worker.rlimit(psutil.RLIMIT_AS, (limit, UNLIMITED))
        threads = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(-N_LONG, N_SHORT)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with suppress(psutil.Error):
            worker.rlimit(psutil.RLIMIT_AS, (UNLIMITED, UNLIMITED))
        # Requests that were cut may have ended before their worker.
        with suppress(psutil.TimeoutExpired):
            worker.wait(0.5)
        has_ended = self.house.state().n_crashes > n_crashes or not worker.is_running()
        self._count("n_ended" if has_ended else "n_survived")
        self._check(n_crashes + has_ended)

    def _kill(self, phase: "Phase") -> None:
        """SIGKILL in a phase of one request, beside a short one."""
        n_crashes = self.house.state().n_crashes
        beside = threading.Thread(target=self._ask, args=(0,))
        beside.start()
        with phase(self):
            time.sleep(self._random.random() * MARGIN_S)
            self.house.strike(signal.SIGKILL)
        beside.join()
        self._count("n_kills")
        self._check(n_crashes + 1)

    def _ask(self, number: int) -> None:
        """A greedy answer, an error in words, or the end of a connection."""
        body = _body(number)
        try:
            reply = self.http.post("/v1/chat/completions", json=body)
        except httpx.TimeoutException:
            raise
        except httpx.TransportError:
            self._count("n_cut")
            return
        if reply.status_code == 200:
            if number in self._expected:
                assert _content(reply.json()) == self._expected[number], "another answer"
            self._count("n_answered")
            return
        assert 500 <= reply.status_code < 600 and reply.json()["error"]["message"], reply.text
        self._count("n_errors")

    def _check(self, n_crashes: int) -> None:
        """The service is as before, and names the end of its last worker."""
        status = self.house.healthy(n_restarts=n_crashes)
        if n_crashes:
            assert any(cause in status.detail for cause in CAUSES), status.detail
        for number, expected in self._expected.items():
            assert _text(self.http, number) == expected, f"prompt {number}"
            self._count("n_compared")
        listed = self.http.get("/v1/agents").raise_for_status().json()
        assert set(self._agents) <= {card["id"] for card in listed["data"]}, listed
        for agent, messages in self._agents.items():
            warm = answer(self.http, agent, messages)
            assert warm.text == answer(self.http, None, messages, cache_prompt=False).text, agent
            assert warm.n_cached, f"KV of {agent} is lost"
            self._count("n_compared")
        self._restore()

    def _restore(self) -> None:
        """The slot file is whole."""
        reply = self.http.post("/slots/0?action=restore", json={"filename": FILE})
        assert reply.is_success and reply.json()["n_restored"], reply.text

    def _worker(self) -> psutil.Process:
        worker = self.house.state().worker
        assert worker is not None
        return psutil.Process(worker.pid)

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    @contextmanager
    def asking(self, path: str, body: Mapping[str, Any]) -> Iterator[None]:
        """A request in a thread, which may be cut."""

        def ask() -> None:
            with suppress(httpx.TransportError):
                self.http.post(path, json=body)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            thread.join()


@contextmanager
def prefill(run: ShortageRun) -> Iterator[None]:
    """A long prompt in a slot."""
    with run.asking("/v1/chat/completions", _body(-1)):
        run.house.until(lambda: _is_busy(run.http))
        yield


@contextmanager
def decode(run: ShortageRun) -> Iterator[None]:
    """A stream whose first token came."""
    body = {**_body(1), "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with (
        suppress(httpx.TransportError),
        run.http.stream("POST", "/v1/chat/completions", json=body) as reply,
    ):
        lines = reply.iter_lines()
        next(line for line in lines if line.startswith("data: {"))
        yield
        for _ in lines:
            pass


@contextmanager
def save(run: ShortageRun) -> Iterator[None]:
    """A save over the slot file."""
    with run.asking("/slots/0?action=save", {"filename": FILE}):
        yield


@contextmanager
def restore(run: ShortageRun) -> Iterator[None]:
    """A restore of the slot file."""
    with run.asking("/slots/1?action=restore", {"filename": FILE}):
        yield


Phase = Callable[[ShortageRun], Any]
PHASES: tuple[Phase, ...] = (prefill, decode, save, restore)


def out_of_memory(root: Path, shortage: Shortage, seed: int) -> ShortageOutcome:
    """Raises AssertionError where something is not as before."""
    return ShortageRun(root, shortage, seed).run()


def _body(number: int) -> dict[str, Any]:
    """A short prompt, or a long one for a number below 0."""
    text = f"pear {-number} " * 600 if number < 0 else f"What is the color of pear {number}?"
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 8, "temperature": 0, "cache_prompt": False}


def _text(http: httpx.Client, number: int) -> str:
    reply = http.post("/v1/chat/completions", json=_body(number), timeout=PATIENCE_S)
    return _content(reply.raise_for_status().json())


def _content(reply: dict[str, Any]) -> str:
    message = reply["choices"][0]["message"]
    return f"{message.get('reasoning_content')}/{message['content']}"


def _is_busy(http: httpx.Client) -> bool:
    slots = http.get("/slots").raise_for_status().json()
    return any(slot["is_processing"] for slot in slots)


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp(prefix="memory-"))
    print(out_of_memory(folder, Shortage(), seed=1), flush=True)
