"""Turns the engine's events about one ask into the parts of its reply."""

import logging
import time
import uuid
from collections.abc import Iterable

from msgspec import Struct, structs

from mlxstack.core.ask import Ask
from mlxstack.core.errors import Busy
from mlxstack.core.event import Chosen, Event, Finished, FinishReason, Progress, Seated
from mlxstack.service.parts import (
    Called,
    Content,
    Ended,
    Ending,
    Note,
    Part,
    Progressed,
    Quiet,
    Reasoning,
    Started,
)
from mlxstack.text.replay import Replay, Scope
from mlxstack.text.speech import Call, Delta, Manner, Speech, Stop, Thought, Words
from mlxstack.text.voice import Voice

log = logging.getLogger("mlxstack.service")

ENDINGS = {
    FinishReason.EOS: Ending.EOS,
    FinishReason.LENGTH: Ending.LENGTH,
    FinishReason.CONTEXT: Ending.CONTEXT,
}


class Hearing(Struct, frozen=True):
    """How a reply is to be heard.

    `forced` are tokens of the answer that the prompt ends with. `may_fill_context`: the caller
    set no limit below the room that was left. `is_prefill`: only the prompt is to be computed.
    """

    manner: Manner
    forced: tuple[int, ...] = ()
    call_prefix: str = "call_"
    may_fill_context: bool = False
    is_one_call: bool = False
    has_progress: bool = False
    is_prefill: bool = False


class Ear:
    """Hears one reply. `is_enough` asks to cancel: what the caller wanted has been said."""

    def __init__(self, ask: Ask, hearing: Hearing, voice: Voice, replay: Replay) -> None:
        self.is_enough = False
        self._ask = ask
        self._hearing = hearing
        self._replay = replay
        self._speech = Speech(
            voice, hearing.manner, lambda: f"{hearing.call_prefix}{uuid.uuid4().hex[:24]}"
        )
        for token in hearing.forced:
            self._speech.push(token)
        self._started = Started(slot=-1, n_prompt=len(ask.tokens), n_cached=0)
        self._seated_at = 0.0
        self._n_done = 0
        self._n_heard = 0
        self._notes: list[Note] = []

    def hear(self, event: Event | None) -> list[Part]:
        """What the event adds to the reply. Raises Busy when the engine gave the ask up."""
        match event:
            case Seated():
                return [self._seat(event), *self._progress(event.n_cached)]
            case Progress():
                return self._progress(event.n_done)
            case Chosen() if not self.is_enough:
                return self._choose(event)
            case Finished():
                return self._finish(event)
        return []

    def quiet(self) -> Quiet:
        """How far the prompt is, while there is nothing to say."""
        return Quiet(self._n_done, len(self._ask.tokens))

    def _seat(self, seated: Seated) -> Started:
        self._seated_at, self._n_done = time.monotonic(), seated.n_cached
        self._started = Started(
            slot=seated.slot,
            n_prompt=len(self._ask.tokens),
            n_cached=seated.n_cached,
            source=seated.source,
            miss=seated.miss,
        )
        return self._started

    def _progress(self, n_done: int) -> list[Part]:
        self._n_done = n_done
        if not self._hearing.has_progress:
            return []
        elapsed_ms = round((time.monotonic() - self._seated_at) * 1000)
        return [Progressed(n_done, len(self._ask.tokens), self._started.n_cached, elapsed_ms)]

    def _choose(self, chosen: Chosen) -> list[Part]:
        """The first token tells that the prompt is done; the end of a text is no token of it."""
        n_prompt = len(self._ask.tokens)
        done = self._progress(n_prompt) if self._n_done < n_prompt else []
        if self._hearing.is_prefill:
            self.is_enough = True
            return done
        self._n_heard += 1
        if chosen.token not in self._ask.eos:
            self._notes.append(Note(chosen.token, chosen.logprob, chosen.top))
        return [*done, *self._parts(self._speech.push(chosen.token))]

    def _parts(self, deltas: Iterable[Delta]) -> list[Part]:
        parts: list[Part] = []
        for delta in deltas:
            match delta:
                case Thought():
                    parts.append(Reasoning(delta.text, self._take_notes()))
                case Words():
                    parts.append(Content(delta.text, self._take_notes()))
                case Call():
                    parts.append(self._call(delta))
                case Stop():
                    self.is_enough = True
            if self.is_enough:
                break
        return parts

    def _call(self, delta: Call) -> Called:
        call = delta.call
        if delta.block is not None:
            scope = Scope(self._ask.salt, self._ask.name or "")
            self._replay.remember(scope, delta.block)
        self.is_enough = self._hearing.is_one_call
        assert isinstance(call.arguments, dict)
        return Called(call.id, call.name, call.arguments)

    def _take_notes(self) -> tuple[Note, ...]:
        notes, self._notes = tuple(self._notes), []
        return notes

    def _finish(self, finished: Finished) -> list[Part]:
        is_over = self.is_enough or self._hearing.is_prefill
        parts = [] if is_over else self._parts(self._speech.finish(finished.reason))
        work = finished.work
        if is_over:
            work = structs.replace(work, n_generated=self._n_heard)
        ended = Ended(
            ending=self._ending(finished.reason),
            work=work,
            slot=self._started.slot,
            n_reasoning=self._speech.n_reasoning,
            word=self._speech.stop,
            notes=self._take_notes(),
            n_unparsed=self._speech.n_unparsed,
        )
        log.info(
            "%s slot=%d prompt=%d cached=%d generated=%d ttft=%.3fs ended=%s",
            self._ask.id, ended.slot, work.n_prompt, work.n_cached, work.n_generated,
            work.ttft_s, ended.ending.value,
        )  # fmt: skip
        return [*parts, ended]

    def _ending(self, reason: FinishReason) -> Ending:
        if self._speech.stop is not None:
            return Ending.WORD
        if self.is_enough:
            return Ending.LENGTH if self._hearing.is_prefill else Ending.EOS
        if reason is FinishReason.CANCELLED:
            raise Busy("the request was cancelled by the service, which may be stopping")
        if reason is FinishReason.LENGTH and self._hearing.may_fill_context:
            return Ending.CONTEXT
        return ENDINGS[reason]
