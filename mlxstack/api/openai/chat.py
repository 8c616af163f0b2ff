"""Chat completions: the whole answer, or its stream."""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from msgspec import UNSET, Struct, structs

from mlxstack.api import sse
from mlxstack.api.errors import Dialect, understand
from mlxstack.api.errors import body as error_body
from mlxstack.api.logprobs import logprobs
from mlxstack.api.openai.wire import (
    FINGERPRINT,
    Choice,
    Chunk,
    ChunkChoice,
    Completion,
    Delta,
    Message,
    Progress,
    call_deltas,
    finish_reason,
    whole_call,
)
from mlxstack.api.timings import timings, usage
from mlxstack.service.parts import (
    Called,
    Content,
    Ended,
    Note,
    Part,
    Progressed,
    Quiet,
    Reasoning,
    Reply,
)
from mlxstack.service.words import Words


class Wants(Struct, frozen=True):
    """What the stream shall carry, and under which names."""

    id: str
    model: str
    has_usage: bool = False


def whole(reply: Reply, wants: Wants, words: Words) -> Completion:
    """The answer to a request that does not stream."""
    message = Message(
        content=reply.content or (None if reply.calls else ""),
        reasoning_content=reply.reasoning or UNSET,
        tool_calls=tuple(whole_call(call) for call in reply.calls) or UNSET,
    )
    choice = Choice(
        message=message,
        finish_reason=finish_reason(reply.ended, bool(reply.calls)),
        logprobs=logprobs(reply.notes, words),
    )
    return Completion(
        id=wants.id,
        created=int(time.time()),
        model=wants.model,
        system_fingerprint=FINGERPRINT,
        choices=(choice,),
        usage=usage((reply.ended,)),
        timings=timings(reply.ended.work),
    )


async def frames(
    first: Part, rest: AsyncGenerator[Part, None], wants: Wants, words: Words
) -> AsyncGenerator[bytes, None]:
    """The stream, from the role to [DONE], or to the error that ended it."""
    stream = Stream(wants, words)
    async with aclosing(rest):
        try:
            yield stream.opening()
            for data in stream.render(first):
                yield data
            async for part in rest:
                for data in stream.render(part):
                    yield data
            yield sse.DONE
        except Exception as problem:
            yield sse.frame(error_body(understand(problem), Dialect.OPENAI, wants.id))


class Stream:
    """Turns parts into frames, counting the calls."""

    def __init__(self, wants: Wants, words: Words) -> None:
        self._wants = wants
        self._words = words
        self._created = int(time.time())
        self._n_calls = 0

    def opening(self) -> bytes:
        """The frame that says who speaks."""
        return self._say(Delta(role="assistant", content=""))

    def render(self, part: Part) -> Iterator[bytes]:
        """The frames of one part; none for parts that this request did not ask for."""
        match part:
            case Quiet():
                yield sse.keepalive(part.n_done, part.n_prompt)
            case Progressed():
                yield self._progress(part)
            case Reasoning():
                yield self._say(Delta(reasoning_content=part.text), part.notes)
            case Content():
                yield self._say(Delta(content=part.text), part.notes)
            case Called():
                for delta in call_deltas(part, self._n_calls):
                    yield self._say(delta)
                self._n_calls += 1
            case Ended():
                yield from self._end(part)

    def _say(self, delta: Delta, notes: tuple[Note, ...] = ()) -> bytes:
        return sse.frame(self._chunk(ChunkChoice(delta, logprobs=logprobs(notes, self._words))))

    def _progress(self, part: Progressed) -> bytes:
        progress = Progress(part.n_prompt, part.n_cached, part.n_done, part.elapsed_ms)
        choice = ChunkChoice(Delta(role="assistant", content=None))
        return sse.frame(structs.replace(self._chunk(choice), prompt_progress=progress))

    def _end(self, ended: Ended) -> Iterator[bytes]:
        reason = finish_reason(ended, self._n_calls > 0)
        last = self._chunk(
            ChunkChoice(Delta(), reason, logprobs=logprobs(ended.notes, self._words))
        )
        spent = timings(ended.work)
        if not self._wants.has_usage:
            yield sse.frame(structs.replace(last, timings=spent))
            return
        yield sse.frame(last)
        yield sse.frame(structs.replace(self._chunk(), usage=usage((ended,)), timings=spent))

    def _chunk(self, *choices: ChunkChoice) -> Chunk:
        return Chunk(
            id=self._wants.id,
            created=self._created,
            model=self._wants.model,
            system_fingerprint=FINGERPRINT,
            choices=choices,
        )
