"""Renders chat completions, whole and as a stream."""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, UnsetType, structs

from mlxstack.api import streaming
from mlxstack.api.custom_tools import InputDecoder, input_text
from mlxstack.api.dialects.openai_chat import to_conversation
from mlxstack.api.dialects.openai_chat.request_schema import ChatBody
from mlxstack.api.dialects.openai_chat.response_schema import (
    FINGERPRINT,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    ChatToolCall,
    Chunk,
    ChunkChoice,
    CustomCall,
    Delta,
    FunctionCall,
    Verbose,
    prompt_progress,
)
from mlxstack.api.error_bodies import openai_error
from mlxstack.api.response_fields import Stopwatch, logprobs, timings, usage
from mlxstack.core.engine_events import TokenSampled
from mlxstack.core.errors import StackError
from mlxstack.core.response_parts import (
    ArgumentsPart,
    CollectedResponse,
    ContentPart,
    FinishCause,
    GenerationFinished,
    KeepAlive,
    PrefillProgressed,
    ReasoningPart,
    ResponsePart,
    ToolCallPart,
    ToolCallStarted,
)

if TYPE_CHECKING:
    from mlxstack.service.parts.text_processor import TextProcessor


def _choice(
    index: int, reply: CollectedResponse, body: ChatBody, text_processor: "TextProcessor"
) -> ChatChoice:
    message = ChatMessage(
        content=reply.content or (None if reply.calls else ""),
        reasoning_content=reply.reasoning or UNSET,
    )
    is_legacy = to_conversation.is_legacy(body)
    if is_legacy and reply.calls:
        call = reply.calls[0]
        message = structs.replace(
            message, function_call=FunctionCall(call.arguments_json, call.name)
        )
    elif reply.calls:
        custom_tools = to_conversation.custom_names(body)
        calls = tuple(whole_call(call, custom_tools) for call in reply.calls)
        message = structs.replace(message, tool_calls=calls)
    return ChatChoice(
        index=index,
        message=message,
        finish_reason=finish_reason(reply.ended, reply.has_calls, is_legacy=is_legacy),
        logprobs=logprobs(reply.notes, text_processor),
    )


class ChatRenderer(streaming.Renderer):
    """Renders the choices of the answer to a body, one reply each."""

    def __init__(
        self,
        body: ChatBody,
        request: str,
        model: str,
        text_processor: "TextProcessor",
        n_choices: int = 1,
        verbose: Verbose | UnsetType = UNSET,
    ) -> None:
        self._body, self._text_processor, self._verbose = body, text_processor, verbose
        self._has_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._blank = Chunk(
            id=request,
            created=int(time.time()),
            model=model,
            system_fingerprint=FINGERPRINT,
            choices=(),
            usage=None if self._has_usage else UNSET,
        )
        self._choices = [
            ChatStream(i, body, self._blank, text_processor, verbose) for i in range(n_choices)
        ]

    def whole(self, replies: tuple[CollectedResponse, ...]) -> ChatCompletion:
        """Response without a stream, with one choice per reply."""
        ended = [reply.ended for reply in replies]
        return ChatCompletion(
            id=self._blank.id,
            created=int(time.time()),
            model=self._blank.model,
            system_fingerprint=FINGERPRINT,
            choices=tuple(
                _choice(i, reply, self._body, self._text_processor)
                for i, reply in enumerate(replies)
            ),
            usage=usage(ended, len(ended)),
            timings=timings(ended[0].work),
            verbose=self._verbose,
        )

    def opening(self) -> Iterator[bytes]:
        return (choice.opening() for choice in self._choices)

    def render(self, index: int, part: ResponsePart) -> Iterator[bytes]:
        return self._choices[index].render(part)

    def closing(self) -> Iterator[bytes]:
        if self._has_usage:
            ended = [choice.ended for choice in self._choices if choice.ended]
            yield self._choices[0].closing(ended)
        yield streaming.DONE

    def failure(self, error: StackError) -> bytes:
        return streaming.frame(openai_error(error, self._blank.id))


class ChatStream:
    """Renders the parts of one choice as chunks, counting its tool calls.

    Each is the `blank` chunk with choices; the last one is `verbose` where that is wanted.
    """

    def __init__(
        self,
        index: int,
        body: ChatBody,
        blank: Chunk,
        text_processor: "TextProcessor",
        verbose: Verbose | UnsetType,
    ) -> None:
        self.ended: GenerationFinished | None = None
        self._index = index
        self._blank = blank
        asked = body.stream_options
        self._has_counts = bool(asked and asked.include_usage and asked.continuous_usage_stats)
        self._has_pace = bool(body.timings_per_token)
        self._custom_tools = to_conversation.custom_names(body)
        self._is_legacy = to_conversation.is_legacy(body)
        self._verbose = verbose
        self._watch = Stopwatch(time.monotonic)
        self._text_processor = text_processor
        self._n_calls = 0
        self._input: InputDecoder | None = None
        self._has_calls = False

    def opening(self) -> bytes:
        """First chunk, with the role."""
        # No text, rather than an empty one: it may begin with a tool call.
        return streaming.frame(self._chunk(self._choice(Delta(role="assistant", content=None))))

    def render(self, part: ResponsePart) -> Iterator[bytes]:
        """Chunks of one part; none for parts that were not requested."""
        self._watch.count(part)
        match part:
            case KeepAlive():
                yield streaming.keepalive(part.n_done, part.n_prompt)
            case PrefillProgressed():
                yield self._progress(part)
            case ReasoningPart():
                yield self._say(Delta(reasoning_content=part.text), part.notes)
            case ContentPart():
                yield self._say(Delta(content=part.text), part.notes)
            case ToolCallStarted():
                self._n_calls += 1
                yield self._say(self._call_head(part))
            case ArgumentsPart():
                yield from self._arguments(part)
            case ToolCallPart():
                self._has_calls = not part.is_cut
                if self._input and not part.is_cut and (rest := self._input.end()):
                    yield self._say(self._call(custom=CustomCall(rest)))
            case GenerationFinished():
                self.ended = part
                yield self._end(part)

    def closing(self, ended: Sequence[GenerationFinished]) -> bytes:
        """Last chunk, with the usage of all choices."""
        spent, total = timings(ended[0].work), usage(ended, len(ended))
        return streaming.frame(structs.replace(self._blank, usage=total, timings=spent))

    def _call_head(self, started: ToolCallStarted) -> Delta:
        """First delta of a call, which names it."""
        if self._is_legacy:
            return Delta(function_call=FunctionCall("", started.name))
        is_custom = started.name in self._custom_tools
        self._input = InputDecoder() if is_custom else None
        if is_custom:
            return self._call(id=started.id, type="custom", custom=CustomCall("", started.name))
        function = FunctionCall("", started.name)
        return self._call(id=started.id, type="function", function=function)

    def _arguments(self, part: ArgumentsPart) -> Iterator[bytes]:
        """Chunk of a piece of a call's arguments, or of the input that it holds."""
        if self._is_legacy:
            yield self._say(Delta(function_call=FunctionCall(part.text)), part.notes)
        elif self._input is None:
            yield self._say(self._call(function=FunctionCall(part.text)), part.notes)
        elif (text := self._input.add(part.text)) or part.notes:
            yield self._say(self._call(custom=CustomCall(text)), part.notes)

    def _call(self, **fields: Any) -> Delta:
        return Delta(tool_calls=(ChatToolCall(index=self._n_calls - 1, **fields),))

    def _say(self, delta: Delta, notes: tuple[TokenSampled, ...] = ()) -> bytes:
        chunk = self._chunk(self._choice(delta, notes))
        if self._has_pace:
            chunk = structs.replace(chunk, timings=self._watch.timings())
        if self._has_counts:
            chunk = structs.replace(chunk, usage=self._watch.usage())
        return streaming.frame(chunk)

    def _choice(
        self, delta: Delta, notes: tuple[TokenSampled, ...] = (), reason: str | None = None
    ) -> ChunkChoice:
        return ChunkChoice(
            delta,
            finish_reason=reason,
            index=self._index,
            logprobs=logprobs(notes, self._text_processor),
        )

    def _progress(self, part: PrefillProgressed) -> bytes:
        chunk = self._chunk(self._choice(Delta(role="assistant", content=None)))
        return streaming.frame(structs.replace(chunk, prompt_progress=prompt_progress(part)))

    def _end(self, ended: GenerationFinished) -> bytes:
        """The timings come last: here, unless the usage still follows."""
        reason = finish_reason(ended, self._has_calls, is_legacy=self._is_legacy)
        last = self._chunk(self._choice(Delta(), ended.notes, reason))
        if self._blank.usage is UNSET:
            last = structs.replace(last, timings=timings(ended.work))
        if self._has_counts:
            last = structs.replace(last, usage=usage([ended]))
        return streaming.frame(structs.replace(last, verbose=self._verbose))

    def _chunk(self, *choices: ChunkChoice) -> Chunk:
        return structs.replace(self._blank, choices=choices)


def finish_reason(ended: GenerationFinished, has_calls: bool, *, is_legacy: bool = False) -> str:
    """`tool_calls` after complete calls, even if text followed; older: `function_call`."""
    if has_calls:
        return "function_call" if is_legacy else "tool_calls"
    return "length" if ended.ending in (FinishCause.LENGTH, FinishCause.CONTEXT) else "stop"


def whole_call(called: ToolCallPart, custom_tools: frozenset[str] = frozenset()) -> ChatToolCall:
    """Tool call of a whole response."""
    if called.name in custom_tools:
        text = input_text(called.arguments, called.arguments_json)
        return ChatToolCall(custom=CustomCall(text, called.name), id=called.id, type="custom")
    return ChatToolCall(
        function=FunctionCall(arguments=called.arguments_json, name=called.name),
        id=called.id,
        type="function",
    )
