"""Renders responses as events, and accumulates the whole response."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

from msgspec import UNSET, Struct, json, structs

from mlxstack.api.block_renderer import BlockRenderer, BlockStart, StreamEvent
from mlxstack.api.custom_tools import InputDecoder
from mlxstack.api.dialects.openai_responses.encrypted_reasoning import encode_reasoning
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
    ResponsesUsage,
    SearchCallItem,
    Status,
    SummaryText,
)
from mlxstack.api.dialects.openai_responses.tool_names import ClientTool, ToolKind, ToolNames
from mlxstack.api.error_bodies import openai_message
from mlxstack.api.errors import LOADING_RETRY_S
from mlxstack.api.response_fields import (
    ReasoningTokens,
    SampledLogprob,
    is_limited,
    logprobs,
    timings,
)
from mlxstack.core.engine_events import RequestTimings
from mlxstack.core.errors import BadRequest, Busy, Loading, StackError, TooLong
from mlxstack.core.response_parts import (
    CollectedResponse,
    ContentPart,
    GenerationFinished,
    KeepAlive,
    NotedPart,
    ReasoningPart,
    ResponsePart,
    ToolCallPart,
    ToolCallStarted,
    in_pieces,
)
from mlxstack.service.parts.text_processor import TextProcessor

OnItem = Callable[[OutputItem], None]
Sampled = tuple[SampledLogprob, ...]


class Strand(Struct, frozen=True):
    """Text of an item, and where it is sent.

    `name` is that of its events, `place` are their positions in the item, `field` holds the whole
    text in the last one. `part` is the name of the events of the part that holds it.
    """

    name: str
    place: dict[str, int] = {}
    field: str = "text"
    part: str = ""


OUTPUT = Strand("output_text", {"content_index": 0}, part="content_part")
REASONING = Strand("reasoning_text", {"content_index": 0}, part="content_part")
SUMMARY = Strand("reasoning_summary_text", {"summary_index": 0}, part="reasoning_summary_part")
ARGUMENTS = Strand("function_call_arguments", field="arguments")
INPUT = Strand("custom_tool_call_input", field="input")


class ItemStream:
    """Output item of the stream; `blank` is the item at its start."""

    def __init__(
        self, index: int, blank: OutputItem, strands: tuple[Strand, ...], *, is_sealed: bool
    ) -> None:
        self._index = index
        self._blank = blank
        self._strands = strands
        self._is_sealed = is_sealed
        self._input = InputDecoder() if isinstance(blank, CustomCallItem) else None
        self._texts: list[str] = []
        self._logprobs: list[SampledLogprob] = []

    def begin(self) -> Iterator[StreamEvent]:
        """Start of the item and of its parts, all empty."""
        yield _event("output_item.added", output_index=self._index, item=self._blank)
        for strand in self._strands:
            if strand.part:
                yield self._inside(strand, f"{strand.part}.added", part=_part(strand, ""))

    def add(self, text: str, logprobs: Sampled = ()) -> Iterator[StreamEvent]:
        """Events of a new piece."""
        if self._input is not None:
            text = self._input.add(text)
        if text or self._input is None:
            yield from self._more(text, logprobs)

    def end(self, status: Status) -> Iterator[StreamEvent]:
        """Events with the whole text, which the protocol repeats."""
        if self._input is not None and status == "completed" and (rest := self._input.end()):
            yield from self._more(rest)
        text = "".join(self._texts)
        logprobs = tuple(self._logprobs)
        for strand in self._strands:
            whole = {strand.field: text, **_noted(strand, logprobs)}
            if isinstance(self._blank, FunctionCallItem):
                whole["name"] = self._blank.name
            yield self._inside(strand, f"{strand.name}.done", **whole)
            if strand.part:
                part = _part(strand, text, logprobs)
                yield self._inside(strand, f"{strand.part}.done", part=part)
        yield _event("output_item.done", output_index=self._index, item=self.item(status))

    def item(self, status: Status) -> OutputItem:
        """Item so far."""
        text = "".join(self._texts)
        fields: dict[str, Any] = {strand.field: text for strand in self._strands}
        match self._blank:
            case MessageItem():
                fields = {"content": (OutputText(text, logprobs=tuple(self._logprobs)),)}
            case ReasoningItem():
                fields = {
                    "content": (ReasoningText(text),),
                    "summary": (SummaryText(text),) if SUMMARY in self._strands else (),
                    "encrypted_content": encode_reasoning(text) if self._is_sealed else None,
                }
            case SearchCallItem() if status == "completed":
                fields = {"arguments": json.decode(text)}
        return structs.replace(self._blank, status=status, **fields)

    def _more(self, text: str, logprobs: Sampled = ()) -> Iterator[StreamEvent]:
        self._texts.append(text)
        self._logprobs += logprobs
        for strand in self._strands:
            more = _noted(strand, logprobs)
            yield self._inside(strand, f"{strand.name}.delta", delta=text, **more)

    def _inside(self, strand: Strand, name: str, /, **fields: Any) -> StreamEvent:
        place = {"item_id": self._blank.id, "output_index": self._index, **strand.place}
        return _event(name, **place, **fields)


def _event(name: str, /, **fields: Any) -> StreamEvent:
    return {"type": f"response.{name}", **fields}


def _part(strand: Strand, text: str, logprobs: Sampled = ()) -> Struct:
    if strand is OUTPUT:
        return OutputText(text, logprobs=logprobs)
    if strand is SUMMARY:
        return SummaryText(text)
    return ReasoningText(text)


def _noted(strand: Strand, logprobs: Sampled) -> dict[str, Any]:
    return {"logprobs": logprobs} if strand is OUTPUT else {}


def _call(started: ToolCallStarted, tool: ClientTool) -> tuple[OutputItem, tuple[Strand, ...]]:
    """Call without arguments, and where they go; those of searches come whole."""
    name = uuid4().hex
    call_id = started.id
    namespace = tool.namespace or UNSET
    match tool.kind:
        case ToolKind.SEARCH:
            return SearchCallItem(f"tsc_{name}", call_id, "in_progress", {}), ()
        case ToolKind.CUSTOM:
            item: OutputItem = CustomCallItem(
                f"ctc_{name}", call_id, tool.name, "in_progress", namespace=namespace
            )
            return item, (INPUT,)
    item = FunctionCallItem(f"fc_{name}", call_id, tool.name, "in_progress", namespace=namespace)
    return item, (ARGUMENTS,)


class ResponseStream(BlockRenderer):
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
        super().__init__()
        self.response = response
        self._on_item = on_item
        self._box = box
        self._text_processor = text_processor
        self._is_sealed = is_sealed
        has_summary = response.reasoning.get("summary") not in (None, "none")
        self._reasoning = (REASONING, SUMMARY) if has_summary else (REASONING,)
        self._n_events = 0

    def opening(self) -> Iterator[bytes]:
        return map(self.frame, (self._event("created"), self._event("in_progress")))

    def whole(self, replies: tuple[CollectedResponse, ...]) -> Response:
        """Response that the same events would have built."""
        (reply,) = replies
        for part in (*reply.spoken, reply.ended):
            pieces = in_pieces(part) if isinstance(part, ToolCallPart) else (part,)
            for piece in pieces:
                deque(self.events(piece), maxlen=0)
        return self.response

    def failure(self, error: StackError) -> bytes:
        self.response = structs.replace(self.response, status="failed", error=_failure(error))
        return self.frame(self._event("failed"))

    def frame(self, event: StreamEvent) -> bytes:
        """Server-sent event of an event, with its number."""
        numbered = {**event, "sequence_number": self._n_events}
        self._n_events += 1
        return super().frame(numbered)

    def events(self, part: ResponsePart) -> Iterator[StreamEvent]:
        """Events of one part."""
        match part:
            case KeepAlive():
                # Clients take its output for all that there is.
                whole = self.response
                if self._open:
                    item = self._item.item("in_progress")
                    whole = structs.replace(whole, output=(*whole.output, item))
                yield _event("in_progress", response=whole)
            case GenerationFinished():
                yield from self._finish(part)
            case _:
                yield from super().events(part)

    def begin(self, part: BlockStart) -> Iterator[StreamEvent]:
        """Start of an item."""
        item: OutputItem = MessageItem(f"msg_{uuid4().hex}", "in_progress")
        strands: tuple[Strand, ...] = (OUTPUT,)
        match part:
            case ReasoningPart():
                item = ReasoningItem(f"rs_{uuid4().hex}", "in_progress")
                strands = self._reasoning
            case ToolCallStarted():
                item, strands = _call(part, self._box.offer(part.name))
        index = len(self.response.output)
        self._item = ItemStream(index, item, strands, is_sealed=self._is_sealed)
        yield from self._item.begin()

    def add(self, part: NotedPart) -> Iterator[StreamEvent]:
        """Events of a piece of the item."""
        token_logprobs = None
        if isinstance(part, ContentPart):
            token_logprobs = logprobs(part.notes, self._text_processor)
        yield from self._item.add(part.text, token_logprobs.content if token_logprobs else ())

    def end(self, *, is_cut: bool) -> Iterator[StreamEvent]:
        """End of the item, which becomes part of the response."""
        status: Status = "incomplete" if is_cut else "completed"
        yield from self._item.end(status)
        item = self._item.item(status)
        self.response = structs.replace(self.response, output=(*self.response.output, item))
        self._on_item(item)

    def _finish(self, ended: GenerationFinished) -> Iterator[StreamEvent]:
        """Close a response; an empty one gets an empty message.

        Clients loop otherwise.
        """
        is_cut = is_limited(ended)
        yield from self.close(is_cut=is_cut)
        if not is_cut and all(item.id.startswith("rs_") for item in self.response.output):
            yield from self.open(ContentPart(""))
            yield from self.close()
        response = structs.replace(self.response, usage=usage(ended), timings=timings(ended.work))
        if is_cut:
            cut = IncompleteDetails()
            response = structs.replace(response, status="incomplete", incomplete_details=cut)
        else:
            now = int(time.time())
            response = structs.replace(response, status="completed", completed_at=now)
        self.response = response
        yield self._event(self.response.status)

    def _event(self, name: str) -> StreamEvent:
        """Event of the whole response."""
        return _event(name, response=self.response)


def _failure(error: StackError) -> Failure:
    """Codex retries after `rate_limit_exceeded`, and gives up on the first two."""
    match error:
        case TooLong():
            return Failure("context_length_exceeded", openai_message(error))
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
        loops=work.loops or UNSET,
    )
