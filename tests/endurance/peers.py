"""Two services and a bad connection between them: `python -m tests.endurance.peers SEED N`.

Prompts are fetched from, computed by, and agents are moved to a peer, while the connection is cut,
stalled or altered at some byte, and while the peer gives false answers (`lies`). Every greedy
answer is the one from cold; an agent is where the move says, whole, and a failed move can be made
again; a peer that failed is left alone; no flood is taken whole.
"""

import itertools
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.preset import ModelSpec, Preset, SamplingSpec, ServerSpec, SlotSpec
from mlxstack.features.remote_kv import peers as peers_module
from mlxstack.features.remote_kv import policy as remote_prefill
from mlxstack.features.remote_kv.service import peers_of
from tests.api.running import Running, running
from tests.api.test_peers import until
from tests.api.test_serve import process, wait_for
from tests.endurance.bad_wire import Liar, Wire, WireFault
from tests.endurance.lies import HARMLESS, OF_MOVES, OF_PROMPTS
from tests.ports import unused_port

N_PROMPT = 700
MAX_BYTES = 1 << 26
"""Bytes of a round in one direction, far less than a flood."""
STALL_S = 2.0
PATIENT_S = 100.0
KINDS = ("cut", "flip", "stall")
STORY = "Every stone in the harbor has a name and a number. " * 12
KEY = {"authorization": "Bearer plain"}


class PeersOutcome(Struct):
    """Rounds, faults that were met, answers compared, fetches that worked, moves that worked."""

    n_rounds: int = 0
    n_met: int = 0
    n_compared: int = 0
    n_backed_off: int = 0
    n_fetched: int = 0
    n_moved: int = 0


class Two:
    """The service here, its peer there, and the connection between them."""

    def __init__(
        self, live: Running, wire: Wire, liar: Liar, far_url: str, patch: pytest.MonkeyPatch
    ) -> None:
        self.here = live
        self.wire = wire
        self.liar = liar
        self._there_url = far_url
        self.near = httpx.Client(base_url=live.url, timeout=120)
        self.there = httpx.Client(base_url=far_url, timeout=120, headers=KEY)
        self._seeds = itertools.count(1)
        self._patch = patch
        self.n_bytes = 0, 0
        self.outcome = PeersOutcome()

    def begin(
        self, fault: WireFault | None = None, lie: str = "", *, is_move: bool = False
    ) -> None:
        """The peer counts as sound and fast, the fault or the lie is still to come."""
        self.liar.lie = (OF_MOVES if is_move else OF_PROMPTS)[lie] if lie else None
        self.wire.target = self.liar.url if lie else self._there_url
        self.wire.arm(fault)
        # A peer that may be silent is given up soon, any other one waited for on a busy machine.
        limit_s = STALL_S if fault is not None and fault.kind != "cut" else PATIENT_S
        self._patch.setattr(remote_prefill, "MIN_PATIENCE_S", limit_s)
        self._patch.setattr(peers_module, "MATCH_S", limit_s)
        self._patch.setattr(peers_module, "FILE_S", limit_s)
        peer = peers_of(self.here.service)._peers[0]
        peer.succeed(1 << 30, 1.0)
        peer._until = 0.0
        self.outcome.n_rounds += 1

    def prompt(self, about: str, *, is_there: bool) -> None:
        """A new prompt, which the peer has computed or not."""
        random = Random(f"{about}/{next(self._seeds)}")
        tokens = [random.randrange(20, 1000) for _ in range(N_PROMPT)]
        body = {"prompt": tokens, "n_predict": 6, "temperature": 0, "return_tokens": True}
        if is_there:
            self.there.post("/completion", json=body).raise_for_status()
        answer = self.near.post("/completion", json=body).raise_for_status().json()
        cold = {**body, "cache_prompt": False}
        expected = self.there.post("/completion", json=cold).raise_for_status().json()
        assert answer["tokens"] == expected["tokens"], about
        again = self.near.post("/completion", json=body).raise_for_status().json()
        assert again["tokens"] == expected["tokens"], f"{about}: the second time"
        is_failed = bool(peers_of(self.here.service).views()[0].trouble)
        is_lie = self.liar.lie is not None and about not in HARMLESS
        assert is_failed or not is_lie, f"{about}: the peer is not left alone"
        self.outcome.n_compared += 2
        self.outcome.n_backed_off += is_failed
        self.outcome.n_fetched += answer["timings"]["cache_n"] >= N_PROMPT - 129 and not is_failed
        self._look(about)

    def move(self, about: str) -> None:
        """A new agent is moved, once with the fault and, where that failed, once without."""
        agent = f"agent-{next(self._seeds)}"
        _turn(self.near, agent, f"I am {agent}. {STORY}")
        history = _history(self.near, agent)
        done = self._move(agent)
        if done.status_code != 200:
            assert done.json()["error"]["message"], about
            assert _history(self.near, agent) == history, f"{about}: it was lost here"
            self._look(about)
            self.begin()
            again = self._move(agent)
            assert again.status_code == 200, f"{about}: {again.text}"
        assert self.near.get(f"/v1/agents/{agent}").status_code == 404, f"{about}: it is on both"
        assert _history(self.there, agent) == history, about
        cold = [*history, {"role": "user", "content": "And why?"}]
        plain = {"messages": cold, "max_tokens": 6, "temperature": 0, "cache_prompt": False}
        expected = self.near.post("/v1/chat/completions", json=plain).raise_for_status().json()
        answer = _turn(self.there, agent, "And why?")
        assert answer["choices"][0]["message"] == expected["choices"][0]["message"], about
        self.there.delete(f"/v1/agents/{agent}").raise_for_status()
        self.outcome.n_compared += 1
        self.outcome.n_moved += done.status_code == 200
        self._look(about)

    def _move(self, agent: str) -> httpx.Response:
        return self.near.post(f"/v1/agents/{agent}/move", json={"to": self.wire.url})

    def _look(self, about: str) -> None:
        self.outcome.n_met += self.wire.n_met
        self.n_bytes = self.wire.arm()
        assert max(self.n_bytes) < MAX_BYTES, f"{about}: {self.n_bytes} bytes up and down"
        until(lambda: not peers_of(self.here.service)._n_fetches)
        root = peers_of(self.here.service).store.root
        until(lambda: not list(root.rglob("..tmp-*")))


def peers(root: Path, seed: int, n_wire: int, lies: Iterable[str] | None = None) -> PeersOutcome:
    """`n_wire` faults of the connection by chance, then these lies (all by default)."""
    random = Random(seed)
    with two(root) as pair:
        sizes = _sound(pair)
        for number in range(n_wire):
            is_move = number % 3 == 2
            is_there = number % 3 == 1
            is_up = random.random() < 0.4
            n_bytes = sizes[is_move, is_there][not is_up]
            fault = WireFault(KINDS[number // 3 % len(KINDS)], is_up, random.randrange(n_bytes))
            pair.begin(fault)
            if is_move:
                pair.move(f"{fault}")
            else:
                pair.prompt(f"{fault}", is_there=is_there)
        chosen = None if lies is None else set(lies)
        for name in OF_PROMPTS:
            if chosen is None or name in chosen:
                pair.begin(lie=name)
                pair.prompt(name, is_there=True)
        for name in OF_MOVES:
            if chosen is None or name in chosen:
                pair.begin(lie=name, is_move=True)
                pair.move(name)
        pair.begin()
        pair.prompt("sound in the end", is_there=True)
        assert not peers_of(pair.here.service).views()[0].trouble
        return pair.outcome


def _sound(pair: Two) -> dict[tuple[bool, bool], tuple[int, int]]:
    """Bytes up and down of a sound round, by whether it is a move and the peer has the KV."""
    sizes = {}
    for is_move, is_there in ((False, False), (False, True), (True, False)):
        pair.begin()
        if is_move:
            pair.move("sound")
        else:
            pair.prompt("sound", is_there=is_there)
        sizes[is_move, is_there] = pair.n_bytes
    assert pair.outcome.n_fetched == 2 and pair.outcome.n_moved == 1, pair.outcome
    return sizes


@contextmanager
def two(root: Path) -> Iterator[Two]:
    """Both services under the demo model, whose answers have the same tokens when read again."""
    port = unused_port()
    plain = Preset(
        model=ModelSpec(id="demo"),
        slots=SlotSpec(count=2, n_ctx=2048),
        sampling=SamplingSpec(temperature=0, thinking=False),
        server=ServerSpec(port=port, api_keys=("plain",), drain_s=1),
    )
    (root / "there").mkdir(parents=True)
    far_url = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        # A peer of known speed is waited for.
        patch.setattr(remote_prefill, "CLEARLY", float("inf"))
        patch.setattr(peers_module, "FILE_S", 2 * STALL_S)
        patch.setenv(peers_module.KEY_VARIABLE, "plain")
        stack.enter_context(process(plain, root / "there"))
        wait_for(far_url)
        wire = stack.enter_context(Wire(far_url).serving())
        liar = stack.enter_context(Liar(far_url, KEY).serving())
        ours = replace(plain, server=ServerSpec(port=0, peers=(wire.url,)))
        live = stack.enter_context(running(ours, root / "here"))
        pair = Two(live, wire, liar, far_url, patch)
        stack.callback(pair.near.close)
        stack.callback(pair.there.close)
        for http in (pair.near, pair.there):  # both speeds are known from now on
            http.post("/completion", json={"prompt": [*range(20, 320)], "n_predict": 4})
        yield pair


def _turn(http: httpx.Client, agent: str, text: str) -> Any:
    body = {"append": [{"role": "user", "content": text}], "max_tokens": 6, "temperature": 0}
    return http.post(f"/v1/agents/{agent}/generate", json=body).raise_for_status().json()


def _history(http: httpx.Client, agent: str) -> Any:
    return http.get(f"/v1/agents/{agent}/history").raise_for_status().json()["messages"]


if __name__ == "__main__":
    n_rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 100
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    print(peers(folder, int(sys.argv[1]) if len(sys.argv) > 1 else 1, n_rounds), flush=True)
