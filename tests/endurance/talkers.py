"""Clients that go on talking whatever happens to the service, and note what they were told."""

import json
import threading
from types import TracebackType
from typing import Any, Self

import httpx
from msgspec import Struct

N_TOKENS = 8
MAX_MESSAGES = 24
PATIENCE_S = 60.0
WORDS = ("pear", "boat", "rain", "stone", "lamp", "river", "glass", "cloud")

Messages = tuple[dict[str, str], ...]


class Talk(Struct, frozen=True):
    """Whole answers; refusals with Retry-After; connections refused or cut."""

    n_answers: int = 0
    n_retry_after: int = 0
    n_cut: int = 0


class Answer(Struct, frozen=True):
    """One whole answer, and what of its prompt was known."""

    text: str
    n_prompt: int
    n_cached: int


class Refused(Exception):
    """A 503 that says when to come back."""


def answer(client: httpx.Client, agent: str | None, messages: Messages, **wishes: object) -> Answer:
    """One turn, streamed. Raises Refused, httpx.TransportError, or AssertionError."""
    body: dict[str, Any] = {"messages": messages, "max_tokens": N_TOKENS, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}, **wishes}
    if agent is not None:
        body["agent"] = agent
    text = ""
    usage = None
    last = ""
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code == 503:
            assert "retry-after" in reply.headers, reply.read()
            raise Refused
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            last = line.removeprefix("data: ") or last
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(last)
            if "error" in chunk:
                raise Refused
            usage = chunk.get("usage") or usage
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    assert last == "[DONE]" and usage is not None, "a stream ended early without an error"
    return Answer(text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


class Talker:
    """One agent, who repeats a turn until it is answered."""

    def __init__(self, number: int) -> None:
        self.agent = f"agent-{number}"
        self.n_answers = 0
        self.told = Talk()
        self.last: tuple[Messages, str] = ((), "")
        self.first_of_round: Answer | None = None
        mine = f"You are number {number} and like the word {WORDS[number % len(WORDS)]}. "
        self._messages: Messages = ({"role": "system", "content": mine * 10},)

    def turn(self, client: httpx.Client) -> None:
        """Ask once; what went wrong in an honest way is counted."""
        word = WORDS[self.n_answers % len(WORDS)]
        asked = (*self._messages, {"role": "user", "content": f"{self.n_answers}: {word}"})
        try:
            reply = answer(client, self.agent, asked)
        except Refused:
            self._count(n_retry_after=1)
        except httpx.TimeoutException:
            raise
        except httpx.TransportError:
            self._count(n_cut=1)
        else:
            self._count(n_answers=1)
            self.last = asked, reply.text
            self.first_of_round = self.first_of_round or reply
            message = {"role": "assistant", "content": reply.text}
            self._messages = (*asked, message) if len(asked) < MAX_MESSAGES else asked[:1]
            self.n_answers += 1

    def _count(self, **more: int) -> None:
        was = self.told
        self.told = Talk(**{k: getattr(was, k) + more.get(k, 0) for k in was.__struct_fields__})


class Talkers:
    """Talkers in a thread each, until the end of the `with`."""

    def __init__(self, url: str, n: int, pause_s: float = 0.1) -> None:
        self.all = [Talker(number) for number in range(n)]
        self._url = url
        self._pause_s = pause_s
        self._moved = threading.Condition()
        self._failure: BaseException | None = None
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(talker,)) for talker in self.all]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        self._raise()

    def begin_round(self) -> None:
        """From now on, answers are those of agents who came back."""
        with self._moved:
            for talker in self.all:
                talker.first_of_round = None

    def wait_for_all(self) -> list[float]:
        """Until everybody was answered in this round; shares of their prompts that were known."""

        def is_over() -> bool:
            return self._failure is not None or all(talker.first_of_round for talker in self.all)

        with self._moved:
            assert self._moved.wait_for(is_over, PATIENCE_S), "somebody is never answered"
        self._raise()
        firsts = [talker.first_of_round for talker in self.all]
        return [first.n_cached / first.n_prompt for first in firsts if first is not None]

    def talk(self) -> Talk:
        """What happened to all of them."""
        names = Talk.__struct_fields__
        return Talk(**{k: sum(getattr(talker.told, k) for talker in self.all) for k in names})

    def _run(self, talker: Talker) -> None:
        try:
            with httpx.Client(base_url=self._url, timeout=PATIENCE_S) as client:
                while not self._end.wait(self._pause_s):
                    talker.turn(client)
                    with self._moved:
                        self._moved.notify_all()
        except BaseException as error:
            self._failure = error
            with self._moved:
                self._moved.notify_all()

    def _raise(self) -> None:
        if self._failure is not None:
            raise AssertionError("a client was left alone") from self._failure
