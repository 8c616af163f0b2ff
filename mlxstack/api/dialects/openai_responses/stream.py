"""Renders responses as events, and accumulates the whole response."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from uuid import uuid4

from msgspec import UNSET, json, structs

from mlxstack.api import streaming
from mlxstack.api.custom_tools import InputDecoder
from mlxstack.api.dialects.openai_responses import response_schema as events
from mlxstack.api.dialects.openai_responses.response_schema import (
    CustomCallItem,
    Failure,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponsesEvent,
    ResponsesUsage,
    SearchCallItem,
    Status,
    SummaryText,
)
from mlxstack.api.dialects.openai_responses.to_conversation import (
    ClientTool,
    ToolKind,
    ToolNames,
    encode_reasoning,
)
from mlxstack.api.errors import LOADING_RETRY_S
from mlxstack.api.response_fields import ReasoningTokens, SampledLogprob, logprobs, timings
from mlxstack.core.engine_events import RequestTimings, TokenSampled
from mlxstack.core.errors import BadRequest, Busy, Loading, StackError, TooLong
from mlxstack.core.response_parts import (
    ArgumentsPart,
    CollectedResponse,
    ContentPart,
    FinishCause,
    GenerationFinished,
    KeepAlive,
    ReasoningPart,
    ResponsePart,
    ToolCallPart,
    ToolCallStarted,
    in_pieces,
)
from mlxstack.service.parts.text_processor import TextProcessor

OnItem = Callable[[OutputItem], None]
CUT = frozenset({FinishCause.LENGTH, FinishCause.CONTEXT})


class MessageItemStream:
    """Message item of the stream."""

    def __init__(self, index: int) -> None:
        self._id, self._index = f"msg_{uuid4().hex}", index
        self._texts: list[str] = []
        self._logprobs: list[SampledLogprob] = []

    def begin(self) -> Iterator[ResponsesEvent]:
        """Start of the item and of its one part, both empty."""
        item = MessageItem(self._id, "in_progress")
        yield events.ItemAdded(output_index=self._index, item=item)
        part = OutputText("")
        yield events.PartAdded(item_id=self._id, output_index=self._index, part=part)

    def add(self, text: str, logprobs: tuple[SampledLogprob, ...]) -> Iterator[ResponsesEvent]:
        """Event of new text."""
        self._texts.append(text)
        self._logprobs += logprobs
        yield events.OutputTextDelta(
            item_id=self._id, output_index=self._index, delta=text, logprobs=logprobs
        )

    def end(self, status: Status) -> Iterator[ResponsesEvent]:
        """Events with the whole text, which the protocol repeats three times."""
        item = self.item(status)
        part = item.content[0]
        yield events.TextDone(
            item_id=self._id, output_index=self._index, text=part.text, logprobs=part.logprobs
        )
        yield events.PartDone(item_id=self._id, output_index=self._index, part=part)
        yield events.ItemDone(output_index=self._index, item=item)

    def item(self, status: Status) -> MessageItem:
        """Message so far."""
        text = OutputText("".join(self._texts), logprobs=tuple(self._logprobs))
        return MessageItem(self._id, status, (text,))


class ReasoningItemStream:
    """Reasoning item of the stream, before the answer or between calls."""

    def __init__(self, index: int, *, is_sealed: bool, has_summary: bool) -> None:
        self._id, self._index = f"rs_{uuid4().hex}", index
        self._is_sealed, self._has_summary = is_sealed, has_summary
        self._texts: list[str] = []

    def begin(self) -> Iterator[ResponsesEvent]:
        """Start of the empty item."""
        item = ReasoningItem(self._id, "in_progress")
        yield events.ItemAdded(output_index=self._index, item=item)
        if self._has_summary:
            yield events.SummaryAdded(
                item_id=self._id, output_index=self._index, part=SummaryText("")
            )

    def add(self, text: str, _: tuple[SampledLogprob, ...]) -> Iterator[ResponsesEvent]:
        """Event of new reasoning."""
        self._texts.append(text)
        yield events.ReasoningDelta(item_id=self._id, output_index=self._index, delta=text)
        if self._has_summary:
            yield events.SummaryDelta(item_id=self._id, output_index=self._index, delta=text)

    def end(self, status: Status) -> Iterator[ResponsesEvent]:
        """Events with the whole reasoning."""
        item = self.item(status)
        yield events.ReasoningDone(
            item_id=self._id, output_index=self._index, text=item.content[0].text
        )
        for part in item.summary:
            yield events.SummaryTextDone(item_id=self._id, output_index=self._index, text=part.text)
            yield events.SummaryDone(item_id=self._id, output_index=self._index, part=part)
        yield events.ItemDone(output_index=self._index, item=item)

    def item(self, status: Status) -> ReasoningItem:
        """Reasoning so far."""
        text = "".join(self._texts)
        return ReasoningItem(
            id=self._id,
            status=status,
            content=(ReasoningText(text),),
            summary=(SummaryText(text),) if self._has_summary else (),
            encrypted_content=encode_reasoning(text) if self._is_sealed else None,
        )


class CallStream:
    """Call of the stream, as an item that `kind` makes."""

    prefix = "fc"
    kind: type[FunctionCallItem | CustomCallItem] = FunctionCallItem

    def __init__(self, index: int, call_id: str, tool: ClientTool) -> None:
        self._index, self._call_id, self._tool = index, call_id, tool
        self._id, self._text = f"{self.prefix}_{uuid4().hex}", ""

    def begin(self) -> Iterator[ResponsesEvent]:
        """Start of the item, which names the call."""
        yield events.ItemAdded(output_index=self._index, item=self.item("in_progress"))

    def add(self, text: str, _: tuple[SampledLogprob, ...]) -> Iterator[ResponsesEvent]:
        """Event of a piece of the arguments."""
        self._text += text
        yield events.ArgumentsDelta(item_id=self._id, output_index=self._index, delta=text)

    def end(self, status: Status) -> Iterator[ResponsesEvent]:
        """Events with all arguments."""
        yield events.ArgumentsDone(
            item_id=self._id, output_index=self._index, name=self._tool.name, arguments=self._text
        )
        yield events.ItemDone(output_index=self._index, item=self.item(status))

    def item(self, status: Status) -> OutputItem:
        """Call so far."""
        tool = self._tool
        return self.kind(
            self._id, self._call_id, tool.name, status, self._text, tool.namespace or UNSET
        )


class CustomCallStream(CallStream):
    """Call of a custom tool, whose input is plain text."""

    prefix, kind = "ctc", CustomCallItem

    def __init__(self, index: int, call_id: str, tool: ClientTool) -> None:
        super().__init__(index, call_id, tool)
        self._input = InputDecoder()

    def add(self, text: str, _: tuple[SampledLogprob, ...]) -> Iterator[ResponsesEvent]:
        """Event of a piece of the text."""
        yield from self._more(self._input.add(text))

    def _more(self, text: str) -> Iterator[ResponsesEvent]:
        self._text += text
        if text:
            yield events.CustomInputDelta(item_id=self._id, output_index=self._index, delta=text)

    def end(self, status: Status) -> Iterator[ResponsesEvent]:
        """Events with the whole text."""
        if status == "completed":
            yield from self._more(self._input.end())
        yield events.InputDone(item_id=self._id, output_index=self._index, input=self._text)
        yield events.ItemDone(output_index=self._index, item=self.item(status))


class SearchCallStream(CallStream):
    """Call of the client's search; its arguments come whole, as an object."""

    prefix = "tsc"

    def add(self, text: str, _: tuple[SampledLogprob, ...]) -> Iterator[ResponsesEvent]:
        """No event of a piece of the arguments."""
        self._text += text
        return iter(())

    def end(self, status: Status) -> Iterator[ResponsesEvent]:
        """Event with all arguments."""
        yield events.ItemDone(output_index=self._index, item=self.item(status))

    def item(self, status: Status) -> OutputItem:
        """Call, without arguments until they are complete."""
        arguments = json.decode(self._text) if status == "completed" else {}
        return SearchCallItem(self._id, self._call_id, status, arguments)


CALL_STREAMS: dict[ToolKind, type[CallStream]] = {
    ToolKind.FUNCTION: CallStream,
    ToolKind.CUSTOM: CustomCallStream,
    ToolKind.SEARCH: SearchCallStream,
}
OutputItemStream = MessageItemStream | ReasoningItemStream | CallStream


class ResponseStream(streaming.Renderer):
    """Renderer of one response.

    `is_sealed` adds `encrypted_content` to reasoning items. `on_item` gets each item at its end.
    """

    def __init__(
        self,
        response: Response,
        box: ToolNames,
        text_processor: TextProcessor,
        on_item: OnItem,
        *,
        is_sealed: bool,
    ) -> None:
        self.response = response
        self._on_item = on_item
        self._box = box
        self._text_processor = text_processor
        self._is_sealed = is_sealed
        self._has_summary = response.reasoning.get("summary") not in (None, "none")
        self._open: OutputItemStream | None = None
        self._n_events = 0

    def opening(self) -> Iterator[bytes]:
        return self._numbered(
            [events.Created(response=self.response), events.InProgress(response=self.response)]
        )

    def whole(self, replies: tuple[CollectedResponse, ...]) -> Response:
        """Response that the same events would have built."""
        (reply,) = replies
        for spoken in (*reply.spoken, reply.ended):
            parts = in_pieces(spoken) if isinstance(spoken, ToolCallPart) else (spoken,)
            for part in parts:
                deque(self._on_part(part), maxlen=0)
        return self.response

    def render(self, _: int, part: ResponsePart) -> Iterator[bytes]:
        return self._numbered(self._on_part(part))

    def failure(self, error: StackError) -> bytes:
        self.response = structs.replace(self.response, status="failed", error=_failure(error))
        return next(self._numbered([events.FailedEvent(response=self.response)]))

    def _numbered(self, events: Iterable[ResponsesEvent]) -> Iterator[bytes]:
        for event in events:
            event.sequence_number = self._n_events
            self._n_events += 1
            yield streaming.frame(event, str(type(event).__struct_config__.tag))

    def _on_part(self, part: ResponsePart) -> Iterator[ResponsesEvent]:
        match part:
            case KeepAlive():
                yield events.InProgress(response=self.response)
            case ReasoningPart():
                yield from self._say(ReasoningItemStream, part.text, ())
            case ContentPart():
                yield from self._say(MessageItemStream, part.text, self._logprobs(part.notes))
            case ToolCallStarted():
                yield from self._close("completed")
                yield from self._begin_call(part)
            case ArgumentsPart():
                yield from self._add(part.text, ())
            case ToolCallPart():
                yield from self._close("incomplete" if part.is_cut else "completed")
            case GenerationFinished():
                yield from self._end(part)

    def _say(
        self, kind: type[OutputItemStream], text: str, noted: tuple[SampledLogprob, ...]
    ) -> Iterator[ResponsesEvent]:
        if not isinstance(self._open, kind):
            yield from self._close("completed")
            yield from self._begin(kind)
            # White space separates two texts, which are items of their own here.
            if any(isinstance(item, MessageItem) for item in self.response.output):
                text = text.lstrip()
        yield from self._add(text, noted)

    def _add(self, text: str, noted: tuple[SampledLogprob, ...]) -> Iterator[ResponsesEvent]:
        assert self._open is not None
        yield from self._open.add(text, noted)

    def _begin_call(self, started: ToolCallStarted) -> Iterator[ResponsesEvent]:
        tool, index = self._box.offer(started.name), len(self.response.output)
        self._open = CALL_STREAMS[tool.kind](index, started.id, tool)
        yield from self._open.begin()

    def _begin(self, kind: type[OutputItemStream]) -> Iterator[ResponsesEvent]:
        index = len(self.response.output)
        self._open = MessageItemStream(index)
        if kind is ReasoningItemStream:
            sealed, has_summary = self._is_sealed, self._has_summary
            self._open = ReasoningItemStream(index, is_sealed=sealed, has_summary=has_summary)
        yield from self._open.begin()

    def _close(self, status: Status) -> Iterator[ResponsesEvent]:
        if self._open is not None:
            yield from self._open.end(status)
            self._keep(self._open.item(status))
            self._open = None

    def _keep(self, item: OutputItem) -> None:
        self.response = structs.replace(self.response, output=(*self.response.output, item))
        self._on_item(item)

    def _end(self, ended: GenerationFinished) -> Iterator[ResponsesEvent]:
        """Close a response; an empty one gets an empty message.

        Clients loop otherwise.
        """
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

    def _logprobs(self, notes: tuple[TokenSampled, ...]) -> tuple[SampledLogprob, ...]:
        result = logprobs(notes, self._text_processor)
        return result.content if result else ()


def _failure(error: StackError) -> Failure:
    """Codex retries after `rate_limit_exceeded`, and gives up on the first two."""
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
    """Failure with the retry time in a sentence that clients parse."""
    message = f"{error.message.rstrip('.')}. Please try again in {seconds:g}s."
    return Failure("rate_limit_exceeded", message)


def usage(ended: GenerationFinished) -> ResponsesUsage:
    """Token counts of one response."""
    work: RequestTimings = ended.work
    return ResponsesUsage(
        input_tokens=work.n_prompt,
        input_tokens_details=InputTokensDetails(work.n_cached, work.n_image or UNSET),
        output_tokens=work.n_generated,
        output_tokens_details=ReasoningTokens(ended.n_reasoning),
        total_tokens=work.n_prompt + work.n_generated,
    )
