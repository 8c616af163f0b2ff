"""Renders chat completions, whole and as a stream."""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET, Struct, structs

from mlxstack.api import streaming
from mlxstack.api.dialects.openai_chat.response_schema import (
    FINGERPRINT,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    ChatToolCall,
    Chunk,
    ChunkChoice,
    Delta,
    FunctionCall,
    PromptProgress,
    error_body,
)
from mlxstack.api.response_fields import Stopwatch, logprobs, timings, usage
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
    TokenLogprob,
    ToolCallPart,
    ToolCallStarted,
)

if TYPE_CHECKING:
    from mlxstack.service.text_processor import TextProcessor


class StreamConfig(Struct, frozen=True):
    """Names and optional content of a stream."""

    id: str
    model: str
    has_usage: bool = False
    has_pace: bool = False


def whole(
    replies: Sequence[CollectedResponse], wants: StreamConfig, words: "TextProcessor"
) -> ChatCompletion:
    """Response without a stream, with one choice per reply."""
    ended = [reply.ended for reply in replies]
    return ChatCompletion(
        id=wants.id,
        created=int(time.time()),
        model=wants.model,
        system_fingerprint=FINGERPRINT,
        choices=tuple(_choice(i, reply, words) for i, reply in enumerate(replies)),
        usage=usage(ended, len(ended)),
        timings=timings(ended[0].work),
    )


def _choice(index: int, reply: CollectedResponse, words: "TextProcessor") -> ChatChoice:
    message = ChatMessage(
        content=reply.content or (None if reply.calls else ""),
        reasoning_content=reply.reasoning or UNSET,
        tool_calls=tuple(whole_call(call) for call in reply.calls) or UNSET,
    )
    return ChatChoice(
        index=index,
        message=message,
        finish_reason=finish_reason(reply.ended, reply.has_calls),
        logprobs=logprobs(reply.notes, words),
    )


class ChatRenderer(streaming.Renderer):
    """Renders the choices of one streamed answer, one reply each."""

    def __init__(self, wants: StreamConfig, words: "TextProcessor", n_choices: int = 1) -> None:
        self._wants = wants
        self._choices = [ChatStream(i, wants, words) for i in range(n_choices)]

    def opening(self) -> Iterator[bytes]:
        return (choice.opening() for choice in self._choices)

    def render(self, index: int, part: ResponsePart) -> Iterator[bytes]:
        return self._choices[index].render(part)

    def closing(self) -> Iterator[bytes]:
        if self._wants.has_usage:
            ended = [choice.ended for choice in self._choices if choice.ended]
            yield self._choices[0].closing(ended)
        yield streaming.DONE

    def failure(self, error: StackError) -> bytes:
        return streaming.frame(error_body(error, self._wants.id))


class ChatStream:
    """Renders the parts of one choice as chunks, counting its tool calls."""

    def __init__(self, index: int, wants: StreamConfig, words: "TextProcessor") -> None:
        self.ended: GenerationFinished | None = None
        self._index = index
        self._wants = wants
        self._watch = Stopwatch(time.monotonic)
        self._words = words
        self._created = int(time.time())
        self._n_calls = 0
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
                yield self._say(call_head(part, self._n_calls - 1))
            case ArgumentsPart():
                yield self._say(arguments_delta(part.text, self._n_calls - 1), part.notes)
            case ToolCallPart():
                self._has_calls = not part.is_cut
            case GenerationFinished():
                self.ended = part
                yield self._end(part)

    def closing(self, ended: Sequence[GenerationFinished]) -> bytes:
        """Last chunk, with the usage of all choices."""
        spent, total = timings(ended[0].work), usage(ended, len(ended))
        return streaming.frame(structs.replace(self._chunk(), usage=total, timings=spent))

    def _say(self, delta: Delta, notes: tuple[TokenLogprob, ...] = ()) -> bytes:
        chunk = self._chunk(self._choice(delta, notes))
        if self._wants.has_pace:
            chunk = structs.replace(chunk, timings=self._watch.timings())
        return streaming.frame(chunk)

    def _choice(
        self, delta: Delta, notes: tuple[TokenLogprob, ...] = (), reason: str | None = None
    ) -> ChunkChoice:
        return ChunkChoice(
            delta,
            finish_reason=reason,
            index=self._index,
            logprobs=logprobs(notes, self._words),
        )

    def _progress(self, part: PrefillProgressed) -> bytes:
        progress = PromptProgress(part.n_prompt, part.n_cached, part.n_done, part.elapsed_ms)
        choice = self._choice(Delta(role="assistant", content=None))
        return streaming.frame(structs.replace(self._chunk(choice), prompt_progress=progress))

    def _end(self, ended: GenerationFinished) -> bytes:
        """The timings come last: here, unless the usage still follows."""
        reason = finish_reason(ended, self._has_calls)
        last = self._chunk(self._choice(Delta(), ended.notes, reason))
        if not self._wants.has_usage:
            last = structs.replace(last, timings=timings(ended.work))
        return streaming.frame(last)

    def _chunk(self, *choices: ChunkChoice) -> Chunk:
        return Chunk(
            id=self._wants.id,
            created=self._created,
            model=self._wants.model,
            system_fingerprint=FINGERPRINT,
            choices=choices,
        )


def finish_reason(ended: GenerationFinished, has_calls: bool) -> str:
    """`tool_calls` after complete calls, even if text followed."""
    if has_calls:
        return "tool_calls"
    return "length" if ended.ending in (FinishCause.LENGTH, FinishCause.CONTEXT) else "stop"


def whole_call(called: ToolCallPart) -> ChatToolCall:
    """Tool call of a whole response."""
    return ChatToolCall(
        function=FunctionCall(arguments=called.arguments_json, name=called.name),
        id=called.id,
        type="function",
    )


def call_head(started: ToolCallStarted, index: int) -> Delta:
    """First delta of a call, which names it."""
    function = FunctionCall("", started.name)
    return Delta(tool_calls=(ChatToolCall(function, index=index, id=started.id, type="function"),))


def arguments_delta(text: str, index: int) -> Delta:
    """Delta with a piece of a call's arguments."""
    return Delta(tool_calls=(ChatToolCall(FunctionCall(text), index=index),))
