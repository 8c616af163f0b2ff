"""Slow turns of real coding agents: each is explained by its receipt, as in `/requests`.

A turn is slow by its cause, in place of five seconds: it computes or writes many tokens, or waited
longer than all else took. With --soak the sessions are those of `fleet_recordings` too.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from mlxstack.core.formatting import count, short_time
from mlxstack.core.preset import (
    Anticipation,
    DiskSpec,
    ModelSpec,
    PrefixCacheSpec,
    Preset,
    SamplingSpec,
    ServerSpec,
    SlotSpec,
)
from mlxstack.core.status import RequestView
from mlxstack.features.heads.service import ClientHeads
from mlxstack.features.receipts.policy import Cause, Receipt, seconds_of, waited_s
from tests.api.running import Running, running
from tests.clients.agents import AND_THEN, MAIN, N_CTX, SCRIPT, TASK, project, start
from tests.clients.fleet_recordings import CLIENTS, OWN_WORDS, script, write_project
from tests.clients.stage import Script, model
from tests.patience import PATIENCE_S, wait_until
from tests.repetition import in_soak

pytestmark = [pytest.mark.client, pytest.mark.mlx, pytest.mark.net, pytest.mark.slow]

N_SLOTS = 3
WIDE = 1000
"""Cells of a receipt that shortens nothing."""

DETACHED = PrefixCacheSpec(anticipate=Anticipation.OFF, disk=DiskSpec(enabled=False))
"""Nothing is written or computed beside the turns."""

ENDLESS = "count for ever"
ESSAY = "write an essay"
NUMBERS = [str(number) for number in range(9000)]
LINES: Script = [
    {"when": ENDLESS, "say": " ".join(NUMBERS)},
    {"when": ESSAY, "say": " ".join(NUMBERS[:300])},
]


class Bounds(Struct, frozen=True):
    """A turn beyond one of these is slow."""

    n_computed: int = 1000
    """Tokens of the prompt; the result of a tool has fewer."""
    n_generated: int = 400
    waiting: float = 1.0
    """Seconds of waiting, in those of all else."""

    def is_slow(self, view: RequestView) -> bool:
        """Whether a turn has to be explained."""
        own_s = sum(seconds_of(view).values()) - waited_s(view)
        return (
            self.computes_much(view)
            or view.n_generated > self.n_generated
            or waited_s(view) > self.waiting * own_s
        )

    def computes_much(self, view: RequestView) -> bool:
        """Whether it computed more than a turn adds."""
        return view.n_prompt - view.n_cached > self.n_computed


BOUNDS = Bounds()
RECORDED_BOUNDS = Bounds(n_computed=1500)
"""Results of tools have 1,000 tokens in the recorded session of opencode."""


class SlowTurn(Struct, frozen=True):
    """Slow turn as `/requests` and its receipt have it."""

    view: RequestView
    receipt: Receipt

    @property
    def reasons(self) -> set[str | None]:
        """Reason of its miss, and the largest part of its seconds."""
        return {self.receipt.reason, self.receipt.cause}


class Play:
    """Session of one client with a service of its own, which `restart` replaces."""

    def __init__(self, client: str, folder: Path, *, is_recorded: bool = False) -> None:
        self.client = next(known for known in CLIENTS if known.name == client)
        self.views: list[RequestView] = []
        """Those of the last service, the oldest first; without titles and the like."""
        self.slow: list[SlowTurn] = []
        """Those of all services."""
        self._folder = folder
        self._bounds = RECORDED_BOUNDS if is_recorded else BOUNDS
        self._stack = ExitStack()
        place = project(folder)
        lines, self.questions = SCRIPT, (TASK.format(client), AND_THEN)
        if is_recorded:
            write_project(place)
            lines, self.questions = script(self.client.tools, place), OWN_WORDS
        model_folder = model(folder / "model", [*LINES, *lines])
        self._preset = Preset(
            model=ModelSpec(id=str(model_folder), alias="local-model", trust_remote_code=True),
            slots=SlotSpec(count=N_SLOTS, n_ctx=N_CTX),
            sampling=SamplingSpec(temperature=0),
            server=ServerSpec(port=0),
        )
        self.open()

    def open(self, spec: PrefixCacheSpec = DETACHED) -> None:
        """Start a service."""
        preset = replace(self._preset, prefix_cache=spec)
        self.live = self._stack.enter_context(running(preset, self._folder / "service"))
        self.http = self._stack.enter_context(
            httpx.Client(base_url=self.live.url, timeout=PATIENCE_S)
        )

    def close(self) -> None:
        """Compare receipts and requests, and stop the service."""
        try:
            self._explain(self._bounds)
        finally:
            self._stack.close()

    def restart(self, spec: PrefixCacheSpec = DETACHED) -> None:
        """Stop the service, and start another one in its home."""
        self.close()
        self.open(spec)

    def first(self) -> None:
        """Ask the first question, in a conversation of its own."""
        self._start(self.client.first, self.questions[0])

    def second(self, *options: str, text: str = "") -> None:
        """Ask the second question of the conversation, or this one."""
        self._start(self.client.second, text or self.questions[1], *options)

    def fill_slots(self) -> None:
        """Let conversations of others take all slots."""
        for n in range(N_SLOTS):
            self.http.send(self.request(f"{n} is the number of this other agent. " * 40))

    def request(self, text: str, **more: Any) -> httpx.Request:
        """Request of another agent."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, **more}
        return self.http.build_request("POST", "/v1/chat/completions", json=body)

    def seen(self) -> list[RequestView]:
        """Requests of this service, the oldest first."""
        return msgspec.convert(self.http.get("/requests").json(), list[RequestView])[::-1]

    def _start(self, arguments: tuple[str, ...], text: str, *options: str) -> None:
        *before, last = (word.format(text) for word in arguments)
        start(self.client.name, self.live.url, self._folder, *before, *options, last)

    def _explain(self, bounds: Bounds) -> None:
        """Note slow turns; all receipts say what `/requests` says."""
        self.views = [view for view in self.seen() if view.n_prompt > MAIN]
        for view in self.views:
            found = self.http.get(f"/receipts/{view.id}", params={"width": WIDE})
            receipt = msgspec.convert(found.json(), Receipt)
            agree(view, receipt)
            if bounds.is_slow(view):
                assert receipt.reason or not bounds.computes_much(view)
                self.slow.append(SlowTurn(view, receipt))


def agree(view: RequestView, receipt: Receipt) -> None:
    """The receipt has the figures of the request, and names the largest part of its seconds."""
    assert receipt.reason == (view.miss.reason if view.miss else None)
    seconds = seconds_of(view)
    assert seconds[receipt.cause] == max(seconds.values())
    n_new = view.n_prompt - view.n_cached
    assert receipt.line.startswith(f"{count(view.n_cached)} reused, {count(n_new)} new, ")
    figures = {
        Cause.OTHERS: f"waited {short_time(waited_s(view))} for others",
        Cause.ANSWER: f"{count(view.n_generated)} tokens in {short_time(view.decode_s)}",
        Cause.RESTORE: f"in {short_time(view.restore_s)}",
    }
    assert figures.get(receipt.cause, f"first token {short_time(view.ttft_s)}") in receipt.line
    if view.miss is not None and (view.miss.n_lost or receipt.cause is Cause.PROMPT):
        assert view.miss.reason in receipt.line


def first_message(play: Play) -> None:
    play.first()


def first_message_after_others(play: Play) -> None:
    play.fill_slots()
    play.first()


def changed_system_prompt(play: Play) -> None:
    play.first()
    play.second("--append-system-prompt", "Answer in the style of a friendly pirate.")


def changed_tools(play: Play) -> None:
    play.first()
    play.second("--disallowedTools=Edit")


def evicted(play: Play) -> None:
    play.first()
    play.fill_slots()
    play.http.post("/cache/clear").raise_for_status()
    play.second()


def restart_without_disk(play: Play) -> None:
    play.first()
    play.restart()
    play.second()


def compaction(play: Play) -> None:
    play.first()
    play.second(text="/compact")
    play.second()


def long_answer(play: Play) -> None:
    play.first()
    play.second(text=ESSAY)


def all_slots_busy(play: Play) -> None:
    """Until the turn has waited longer than all turns before it took."""
    play.first()
    taken_s = sum(sum(seconds_of(view).values()) for view in play.seen())

    def has_waited() -> bool:
        waiting = play.live.service.engine.snapshot().waiting
        return any(request.waited_s > taken_s for request in waiting)

    with ThreadPoolExecutor(1) as pool, ExitStack() as talks:
        for n in range(N_SLOTS):
            request = play.request(f"{n}: {ENDLESS}", stream=True, max_tokens=N_CTX // 2)
            answer = play.http.send(request, stream=True)
            next(talks.enter_context(closing(answer.iter_bytes())))
        second = pool.submit(play.second)
        wait_until(lambda: has_waited() or second.done())
        talks.close()
        second.result()


class ReplayedCause(Struct, frozen=True):
    """Client, cause, and the explanation of the slow turn after it."""

    client: str
    happen: Callable[[Play], None]
    reason: str

    @property
    def name(self) -> str:
        """Name of a test."""
        return f"{self.client}-{self.happen.__name__}"


CAUSES = (
    ReplayedCause("codex", first_message, "cold"),
    ReplayedCause("pi", first_message_after_others, "new conversation"),
    ReplayedCause("pi", changed_system_prompt, "diverged"),
    ReplayedCause("claude", changed_tools, "diverged"),
    ReplayedCause("claude", compaction, "diverged"),
    ReplayedCause("codex", evicted, "evicted"),
    ReplayedCause("claude", restart_without_disk, "cold"),
    ReplayedCause("codex", all_slots_busy, Cause.OTHERS),
    ReplayedCause("pi", long_answer, Cause.ANSWER),
    *in_soak(ReplayedCause("opencode", evicted, "evicted")),
)


@pytest.mark.parametrize("is_recorded", [False, *in_soak(True)])
@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_each_slow_turn_is_explained(
    cause: ReplayedCause, tmp_path: Path, is_recorded: bool
) -> None:
    play = Play(cause.client, tmp_path, is_recorded=is_recorded)
    try:
        cause.happen(play)
    finally:
        play.close()
    assert cause.reason in play.slow[-1].reasons


def head_is_ready(live: Running) -> bool:
    feature = live.service.feature(ClientHeads)
    return feature is not None and any(view.state == "ready" for view in feature.views)


def test_no_turn_is_slow_after_a_head_that_was_computed_while_idle(tmp_path: Path) -> None:
    play = Play("codex", tmp_path)
    try:
        play.restart(replace(DETACHED, anticipate=Anticipation.AUTO))
        play.first()
        play.restart(replace(DETACHED, anticipate=Anticipation.AUTO))
        assert play.http.post("/heads", json={"client": "codex"}).json()["is_known"]
        wait_until(lambda: head_is_ready(play.live))
        play.first()
    finally:
        play.close()
    assert [slow.receipt.reason for slow in play.slow] == ["cold"]
