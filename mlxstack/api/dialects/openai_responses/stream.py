"""Tells a reply as the events of a response, and keeps the response that they add up to."""

import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing

from msgspec import structs

from mlxstack.api.dialects.openai_responses import events
from mlxstack.api.dialects.openai_responses.events import ResponsesEvent, frame
from mlxstack.api.dialects.openai_responses.output_items import (
    MessageItemStream,
    ReasoningItemStream,
    Stretch,
    call,
)
from mlxstack.api.dialects.openai_responses.response_schema import (
    Failure,
    IncompleteDetails,
    OutputItem,
    Response,
    Status,
    usage,
)
from mlxstack.api.dialects.openai_responses.tool_names import ToolNames
from mlxstack.api.errors import LOADING_RETRY_S, to_stack_error
from mlxstack.api.logprobs import SampledLogprob, logprobs
from mlxstack.api.run_generation import Parts
from mlxstack.api.usage import timings
from mlxstack.core.errors import BadRequest, Busy, Loading, StackError, TooLong
from mlxstack.service.response_parts import (
    CollectedResponse,
    ContentPart,
    FinishCause,
    GenerationFinished,
    KeepAlive,
    ReasoningPart,
    ResponsePart,
    TokenLogprob,
    ToolCallPart,
)
from mlxstack.service.text_processor import TextProcessor

CUT = frozenset({FinishCause.LENGTH, FinishCause.CONTEXT})


class ResponseStream:
    """One response under way. `is_sealed`: thoughts also go out as `encrypted_content`."""

    def __init__(
        self, response: Response, box: ToolNames, words: TextProcessor, *, is_sealed: bool
    ) -> None:
        self.response = response
        self._box = box
        self._words = words
        self._is_sealed = is_sealed
        self._open: Stretch | None = None
        self._n_events = 0

    def opening(self) -> Iterator[ResponsesEvent]:
        """The first two events."""
        return self._number(
            [events.Created(response=self.response), events.InProgress(response=self.response)]
        )

    def on_part(self, part: ResponsePart) -> Iterator[ResponsesEvent]:
        """The events of one part; none for parts that this dialect does not tell."""
        return self._number(self._told(part))

    def broke(self, problem: Exception) -> ResponsesEvent:
        """The last event of a response that cannot go on."""
        failure = _failure(to_stack_error(problem))
        self.response = structs.replace(self.response, status="failed", error=failure)
        (last,) = self._number([events.FailedEvent(response=self.response)])
        return last

    def _number(self, told: Iterable[ResponsesEvent]) -> Iterator[ResponsesEvent]:
        for event in told:
            event.sequence_number = self._n_events
            self._n_events += 1
            yield event

    def _told(self, part: ResponsePart) -> Iterator[ResponsesEvent]:
        match part:
            case KeepAlive():
                yield events.InProgress(response=self.response)
            case ReasoningPart():
                yield from self._say(ReasoningItemStream, part.text, ())
            case ContentPart():
                yield from self._say(MessageItemStream, part.text, self._logprobs(part.notes))
            case ToolCallPart():
                yield from self._call(part)
            case GenerationFinished():
                yield from self._end(part)

    def _say(
        self, kind: type[Stretch], text: str, noted: tuple[SampledLogprob, ...]
    ) -> Iterator[ResponsesEvent]:
        if not isinstance(self._open, kind):
            yield from self._close("completed")
            yield from self._begin(kind)
        assert self._open is not None
        yield from self._open.add(text, noted)

    def _begin(self, kind: type[Stretch]) -> Iterator[ResponsesEvent]:
        index = len(self.response.output)
        is_message = kind is MessageItemStream
        self._open = (
            MessageItemStream(index)
            if is_message
            else ReasoningItemStream(index, is_sealed=self._is_sealed)
        )
        yield from self._open.begin()

    def _close(self, status: Status) -> Iterator[ResponsesEvent]:
        if self._open is not None:
            yield from self._open.end(status)
            self._keep(self._open.item(status))
            self._open = None

    def _call(self, called: ToolCallPart) -> Iterator[ResponsesEvent]:
        yield from self._close("completed")
        told, item = call(called, self._box.offer(called.name), len(self.response.output))
        yield from told
        self._keep(item)

    def _keep(self, item: OutputItem) -> None:
        self.response = structs.replace(self.response, output=(*self.response.output, item))

    def _end(self, ended: GenerationFinished) -> Iterator[ResponsesEvent]:
        """A response that ended well always has words or a call: clients loop for want of any."""
        is_cut = ended.ending in CUT
        yield from self._close("incomplete" if is_cut else "completed")
        if not is_cut and all(item.id.startswith("rs_") for item in self.response.output):
            yield from self._begin(MessageItemStream)
            yield from self._close("completed")
        self.response = structs.replace(
            self.response,
            status="incomplete" if is_cut else "completed",
            incomplete_details=IncompleteDetails() if is_cut else None,
            completed_at=None if is_cut else int(time.time()),
            usage=usage(ended),
            timings=timings(ended.work),
        )
        last = events.IncompleteEvent if is_cut else events.Completed
        yield last(response=self.response)

    def _logprobs(self, notes: tuple[TokenLogprob, ...]) -> tuple[SampledLogprob, ...]:
        found = logprobs(notes, self._words)
        return found.content if found else ()


def whole(reply: CollectedResponse, telling: ResponseStream) -> Response:
    """The response that the same events would have built (R-3)."""
    for part in (*reply.spoken, reply.ended):
        for _ in telling.on_part(part):
            pass
    return telling.response


async def frames(
    first: ResponsePart, rest: Parts, telling: ResponseStream
) -> AsyncGenerator[bytes, None]:
    """The stream, to the event that ends it; there is no [DONE]."""
    async with aclosing(rest):
        try:
            for event in telling.opening():
                yield frame(event)
            for event in telling.on_part(first):
                yield frame(event)
            async for part in rest:
                for event in telling.on_part(part):
                    yield frame(event)
        except Exception as problem:
            yield frame(telling.broke(problem))


def _failure(error: StackError) -> Failure:
    """Codex waits and tries again after `rate_limit_exceeded`, and gives up on the first two."""
    match error:
        case TooLong():
            return Failure("context_length_exceeded", error.message)
        case BadRequest():
            return Failure("invalid_prompt", error.message)
        case Busy():
            return _later(error, max(1.0, error.retry_after))
        case Loading():
            return _later(error, LOADING_RETRY_S)
    return Failure("server_error", error.message)


def _later(error: StackError, seconds: float) -> Failure:
    """With the words in which clients look for the time to wait."""
    message = f"{error.message.rstrip('.')}. Please try again in {seconds:g}s."
    return Failure("rate_limit_exceeded", message)
