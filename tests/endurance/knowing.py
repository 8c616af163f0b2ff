"""The agents of a chaos, and what their clients know of them."""

import time
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from tests.endurance.stage import Stage
from tests.endurance.talkers import WORDS
from tests.endurance.talking import WAIT_S

N_AGENTS = 9
MAX_MESSAGES = 24
CALM = {200, 409, 503, 529}
"""What a sound request may be answered with: done, busy, a model is being changed."""

Messages = list[dict[str, Any]]
Deed = Callable[[], object]


class Mind:
    """What a client knows of its agent. Unsure: the last turn is in the history, or it is not."""

    def __init__(self) -> None:
        self.messages: Messages = []
        self.new: Messages = []
        self.is_unsure = False
        self.is_spoiled = False


class Agents:
    """`minds` by the agent's id."""

    def __init__(self, stage: Stage) -> None:
        self.minds = {f"agent-{n}": Mind() for n in range(N_AGENTS)}
        self._stage = stage

    def deed(self, name: str, random: Random) -> Deed:
        """What an agent does next."""
        mind = self.minds[name]
        new = [{"role": "user", "content": f"of {random.choice(WORDS)} " * random.randrange(1, 40)}]
        n_tokens = random.randrange(1, 12)
        n_kept = random.randrange(len(mind.messages) + 1)
        if mind.is_spoiled:
            return partial(self._turn, name, new, {"max_tokens": n_tokens}, is_whole=True)
        if len(mind.messages) > MAX_MESSAGES:
            return partial(self._rewind, name, n_kept)
        streamed = {"max_tokens": 12, "stream": True}
        plain = {"max_tokens": n_tokens, "stream": random.random() < 0.5}
        evict = f"/v1/agents/{name}?evict_only=1"
        choices: dict[Deed, int] = {
            partial(self._turn, name, new, plain): 50,
            partial(self._turn, name, new, plain, is_whole=True): 12,
            partial(self._turn, name, new, streamed, leaves_after=random.randrange(1, 8)): 20,
            partial(self._rewind, name, n_kept): 6,
            partial(self._forget, name): 4,
            partial(self._stage.ask, evict, {200, 404, 409, 503}, "DELETE"): 6,
        }
        return random.choices(list(choices), list(choices.values()))[0]

    def _turn(
        self,
        name: str,
        new: Messages,
        more: dict[str, Any],
        *,
        is_whole: bool = False,
        leaves_after: int | None = None,
    ) -> None:
        mind = self.minds[name]
        content = {"messages": mind.messages + new} if is_whole else {"append": new}
        body = {**content, **more, "temperature": 0}
        mind.new = new
        mind.is_unsure = True
        self._stage.did.append(
            f"{name} {'whole' if is_whole else 'append'} {more} {leaves_after or ''}"
        )
        reply = self._stage.wire.chat(f"/v1/agents/{name}/generate", body, leaves_after)
        self._stage.hear(reply, CALM)
        if reply.is_whole and reply.message is not None:
            mind.messages = [*mind.messages, *new, reply.message]
            mind.is_unsure = mind.is_spoiled = False
        elif reply.status is not None and reply.status != 200:
            mind.new = []

    def _rewind(self, name: str, n_messages: int) -> None:
        mind = self.minds[name]
        path = f"/v1/agents/{name}/rewind"
        body = {"n_messages": n_messages}
        reply = self._stage.ask(path, {200, 404, 409, 503}, body=body)
        if reply.status == 200:
            mind.messages = mind.messages[:n_messages]
        elif reply.status is None:
            mind.is_unsure = True
            mind.new = []
            mind.messages = self._either(name, mind.messages[:n_messages])

    def _forget(self, name: str) -> None:
        reply = self._stage.ask(f"/v1/agents/{name}", {200, 404, 409, 503}, "DELETE")
        mind = self.minds[name]
        if reply.status == 200:
            self.minds[name] = Mind()
        elif reply.status is None:
            mind.messages = self._either(name, [])
            mind.new = []

    def fork(self, name: str, copy: str) -> None:
        """`copy`, if there is none, goes on from where `name` is."""
        path = f"/v1/agents/{name}/fork"
        mind = self.minds[copy]
        reply = self._stage.ask(path, {200, 404, 409, 503}, body={"id": copy})
        copied = self.minds[name].messages
        if reply.status == 200:
            assert not mind.messages, f"{copy} was there, and {name} was copied over it"
            mind.messages = copied
        elif reply.status is None and not mind.messages:
            mind.messages = self._either(copy, copied)

    def _either(self, name: str, changed: Messages) -> Messages:
        """After a kill: the history is as it was, or as it was to become."""
        self._stage.house.wait_for_worker(0)
        history = self._history(name)
        assert history in (said(self.minds[name].messages), said(changed)), name
        return self.minds[name].messages if history != said(changed) else changed

    def resync(self) -> None:
        """Every history is what its client knows, or that with the turn that was under way."""
        self._stage.house.wait_for_worker(0)
        for name, mind in self.minds.items():
            if mind.is_spoiled:
                continue
            if mind.is_unsure:
                self._wait_for(name)
            history = self._history(name)
            before = said(mind.messages)
            if mind.is_unsure and history != before:
                after = before + said(mind.new)
                assert mind.new, f"{name} was refused and has a longer history"
                assert history[: len(after)] == after, f"{name}: {history} is neither"
                assert len(history) == len(after) + 1, name
                mind.messages = [*mind.messages, *mind.new, self._whole_history(name)[-1]]
            else:
                assert history == before, f"{name}: {history} and not {before}"
            mind.is_unsure = False

    def _wait_for(self, name: str) -> None:
        """Until its turn is over on the other side too; an agent that is busy cannot go back."""
        end = time.monotonic() + WAIT_S
        path = f"/v1/agents/{name}/rewind"
        body = {"n_messages": -1}
        while self._stage.wire.ask("POST", path, body).status not in {400, 404}:
            assert time.monotonic() < end, f"{name} is still busy"
            time.sleep(0.01)

    def _whole_history(self, name: str) -> Messages:
        reply = self._stage.wire.ask("GET", f"/v1/agents/{name}/history", None)
        assert reply.status in {200, 404}, reply
        messages: Messages = reply.body["messages"] if reply.status == 200 else []
        return messages

    def _history(self, name: str) -> list[tuple[str, str]]:
        return said(self._whole_history(name))

    def prove(self, names: list[str]) -> None:
        """The next greedy answer is the one from cold, alone."""
        probe = [{"role": "user", "content": "and now?"}]
        for name in names:
            mind = self.minds[name]
            before = mind.messages
            self._turn(name, probe, {"max_tokens": 6}, is_whole=mind.is_spoiled)
            assert not mind.is_unsure, f"{name} got no answer though nobody else was there"
            body = {"messages": [*before, *probe], "cache_prompt": False, "max_tokens": 6}
            cold = self._stage.wire.chat("/v1/chat/completions", {**body, "temperature": 0}, None)
            self._stage.hear(cold, {200})
            assert cold.message == mind.messages[-1], f"{name}: not as from cold"
            self._stage.count(n_proven=1)


def said(messages: Messages) -> list[tuple[str, str]]:
    """What two histories must agree in."""
    return [(m["role"], m.get("content") or "") for m in messages]
