"""Renders chat completions, whole and as a stream."""

import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import UNSET, Struct, UnsetType, structs

from mlxstack.api import streaming
from mlxstack.api.custom_tools import CustomTools, InputDecoder, input_text
from mlxstack.api.dialects.openai_chat import to_conversation
from mlxstack.api.dialects.openai_chat.request_schema import ChatBody, ChunkedBody
from mlxstack.api.dialects.openai_chat.response_schema import (
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
from mlxstack.api.response_fields import Stopwatch, is_limited, logprobs, timings, usage
from mlxstack.core.errors import StackError
from mlxstack.core.response_parts import (
    ArgumentsPart,
    CollectedResponse,
    ContentPart,
    GenerationFinished,
    KeepAlive,
    NotedPart,
    PrefillProgressed,
    ReasoningPart,
    ResponsePart,
    ToolCallPart,
    ToolCallStarted,
)

if TYPE_CHECKING:
    from mlxstack.service.parts.text_processor import TextProcessor


# No text, rather than an empty one: it may begin with a tool call.
OPENING = Delta(role="assistant", content=None)


class ChunkRenderer(streaming.Renderer):
    """Renderer of chunks; each is the `blank` one with a choice.

    There are `n_choices` for each of `n_prompts`. The timings come last: in the last chunk of a
    choice, or with the usage after all of them.
    """

    def __init__(
        self, blank: Any, body: ChunkedBody, *, n_choices: int, n_prompts: int = 1
    ) -> None:
        asked = body.stream_options
        self._has_usage = bool(asked and asked.include_usage)
        self._has_counts = bool(self._has_usage and asked and asked.continuous_usage_stats)
        self._has_pace = bool(body.timings_per_token)
        self.blank = structs.replace(blank, usage=None if self._has_usage else UNSET)
        self._n_choices = n_choices
        self._watches = [Stopwatch(time.monotonic) for _ in range(n_prompts * n_choices)]
        self._ended: dict[int, GenerationFinished] = {}

    @abstractmethod
    def choices(self, index: int, part: ResponsePart) -> Iterable[Struct]:
        """Choices of a part; none for parts that were not requested."""

    @abstractmethod
    def last(self, index: int, ended: GenerationFinished) -> dict[str, Any]:
        """Fields of the last chunk of a choice."""

    def render(self, index: int, part: ResponsePart) -> Iterator[bytes]:
        watch = self._watches[index]
        watch.count(part)
        match part:
            case KeepAlive():
                yield streaming.keepalive(part.n_done, part.n_prompt)
            case GenerationFinished():
                self._ended[index] = part
                last = self.last(index, part)
                if not self._has_usage:
                    last["timings"] = timings(part.work)
                if self._has_counts:
                    last["usage"] = usage([part])
                yield self.chunk(**last)
            case _:
                for choice in self.choices(index, part):
                    yield self._piece(choice, watch)

    def closing(self) -> Iterator[bytes]:
        if self._has_usage:
            yield self.chunk(**self.totals([self._ended[i] for i in sorted(self._ended)]))
        yield streaming.DONE

    def failure(self, error: StackError) -> bytes:
        return streaming.frame(openai_error(error, self.blank.id))

    def chunk(self, **fields: Any) -> bytes:
        """Chunk with these fields."""
        return streaming.frame(structs.replace(self.blank, **fields))

    def totals(self, ended: Sequence[GenerationFinished]) -> dict[str, Any]:
        """Usage of all choices, and the timings of the first."""
        return {"usage": usage(ended, self._n_choices), "timings": timings(ended[0].work)}

    def _piece(self, choice: Struct, watch: Stopwatch) -> bytes:
        more: dict[str, Any] = {}
        if self._has_pace:
            more["timings"] = watch.timings()
        if self._has_counts:
            more["usage"] = watch.usage()
        return self.chunk(choices=(choice,), **more)


class ChatRenderer(ChunkRenderer):
    """Renders the choices of the answer to a body, one reply each."""

    def __init__(
        self,
        body: ChatBody,
        request: str,
        model: str,
        text_processor: "TextProcessor",
        n_choices: int = 1,
        verbose: Verbose | UnsetType = UNSET,
        custom_tools: CustomTools | None = None,
    ) -> None:
        blank = Chunk(id=request, created=int(time.time()), model=model, choices=())
        super().__init__(blank, body, n_choices=n_choices)
        self._text_processor = text_processor
        self._verbose = verbose
        self._is_legacy = to_conversation.is_legacy(body)
        self._custom_tools = custom_tools or to_conversation.custom_tools(body)
        self._replies = [
            DeltaMaker(self._custom_tools, is_legacy=self._is_legacy) for _ in range(n_choices)
        ]

    def whole(self, replies: tuple[CollectedResponse, ...]) -> ChatCompletion:
        """Response without a stream, with one choice per reply."""
        return ChatCompletion(
            id=self.blank.id,
            created=int(time.time()),
            model=self.blank.model,
            choices=tuple(self._whole(i, reply) for i, reply in enumerate(replies)),
            verbose=self._verbose,
            **self.totals([reply.ended for reply in replies]),
        )

    def opening(self) -> Iterator[bytes]:
        for index in range(len(self._replies)):
            yield self.chunk(choices=(ChunkChoice(OPENING, index=index),))

    def render(self, index: int, part: ResponsePart) -> Iterator[bytes]:
        if isinstance(part, PrefillProgressed):
            progress = prompt_progress(part)
            yield self.chunk(choices=(ChunkChoice(OPENING, index=index),), prompt_progress=progress)
        else:
            yield from super().render(index, part)

    def choices(self, index: int, part: ResponsePart) -> Iterator[ChunkChoice]:
        notes = part.notes if isinstance(part, NotedPart) else ()
        for delta in self._replies[index].deltas(part):
            noted = logprobs(notes, self._text_processor)
            yield ChunkChoice(delta, index=index, logprobs=noted)

    def last(self, index: int, ended: GenerationFinished) -> dict[str, Any]:
        choice = ChunkChoice(
            Delta(),
            finish_reason=self._reason(ended, self._replies[index].has_calls),
            index=index,
            logprobs=logprobs(ended.notes, self._text_processor),
        )
        return {"choices": (choice,), "verbose": self._verbose}

    def _whole(self, index: int, reply: CollectedResponse) -> ChatChoice:
        message = ChatMessage(
            content=reply.content or (None if reply.calls else ""),
            reasoning_content=reply.reasoning or UNSET,
        )
        if self._is_legacy and reply.calls:
            call = reply.calls[0]
            function = FunctionCall(call.arguments_json, call.name)
            message = structs.replace(message, function_call=function)
        elif reply.calls:
            calls = tuple(whole_call(call, self._custom_tools) for call in reply.calls)
            message = structs.replace(message, tool_calls=calls)
        return ChatChoice(
            index=index,
            message=message,
            finish_reason=self._reason(reply.ended, reply.has_calls),
            logprobs=logprobs(reply.notes, self._text_processor),
        )

    def _reason(self, ended: GenerationFinished, has_calls: bool) -> str:
        return finish_reason(ended, has_calls, is_legacy=self._is_legacy)


class DeltaMaker:
    """Deltas of one choice, of which it counts the tool calls."""

    def __init__(self, custom_tools: CustomTools, *, is_legacy: bool) -> None:
        self.has_calls = False
        self._custom_tools = custom_tools
        self._is_legacy = is_legacy
        self._n_calls = 0
        self._input: InputDecoder | None = None

    def deltas(self, part: ResponsePart) -> Iterator[Delta]:
        """Delta of a part, if it has one."""
        match part:
            case ReasoningPart():
                yield Delta(reasoning_content=part.text)
            case ContentPart():
                yield Delta(content=part.text)
            case ToolCallStarted():
                self._n_calls += 1
                yield self._call_head(part)
            case ArgumentsPart() if self._is_legacy:
                yield Delta(function_call=FunctionCall(part.text))
            case ArgumentsPart():
                if self._input is None:
                    yield self._call(function=FunctionCall(part.text))
                elif (text := self._input.add(part.text)) or part.notes:
                    yield self._input_piece(text)
            case ToolCallPart():
                self.has_calls = not part.is_cut
                if self._input and not part.is_cut and (rest := self._input.end()):
                    yield self._input_piece(rest)

    def _call_head(self, started: ToolCallStarted) -> Delta:
        """First delta of a call, which names it."""
        function = FunctionCall("", started.name)
        if self._is_legacy:
            return Delta(function_call=function)
        is_custom = started.name in self._custom_tools.names
        self._input = InputDecoder() if is_custom else None
        if is_custom and not self._custom_tools.are_functions:
            return self._call(id=started.id, type="custom", custom=CustomCall("", started.name))
        return self._call(id=started.id, type="function", function=function)

    def _input_piece(self, text: str) -> Delta:
        """Delta of the input of a custom tool."""
        if self._custom_tools.are_functions:
            return self._call(function=FunctionCall(text))
        return self._call(custom=CustomCall(text))

    def _call(self, **fields: Any) -> Delta:
        return Delta(tool_calls=(ChatToolCall(index=self._n_calls - 1, **fields),))


def finish_reason(ended: GenerationFinished, has_calls: bool, *, is_legacy: bool = False) -> str:
    """`tool_calls` after complete calls, even if text followed; older: `function_call`."""
    if has_calls:
        return "function_call" if is_legacy else "tool_calls"
    if is_limited(ended):
        return "length"
    return "stop"


def whole_call(called: ToolCallPart, custom_tools: CustomTools) -> ChatToolCall:
    """Tool call of a whole response."""
    text = called.arguments_json
    if called.name in custom_tools.names:
        text = input_text(called.arguments, called.arguments_json)
        if not custom_tools.are_functions:
            return ChatToolCall(custom=CustomCall(text, called.name), id=called.id, type="custom")
    return ChatToolCall(function=FunctionCall(text, called.name), id=called.id, type="function")
