"""Renders Ollama's answers, whole and as lines of JSON."""

import time
from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import UNSET, structs

from mlxstack.api import streaming
from mlxstack.api.dialects.ollama.response_schema import (
    OllamaAnswer,
    OllamaChat,
    OllamaFunction,
    OllamaGeneration,
    OllamaReply,
    OllamaToolCall,
    nanoseconds,
    rfc3339,
)
from mlxstack.api.dialects.openai_chat.stream import finish_reason
from mlxstack.api.error_bodies import OLLAMA_HEARTBEAT, ollama_error
from mlxstack.api.response_fields import logprobs
from mlxstack.core.engine_events import TokenSampled
from mlxstack.core.errors import StackError
from mlxstack.core.response_parts import (
    CollectedResponse,
    ContentPart,
    GenerationFinished,
    KeepAlive,
    ReasoningPart,
    ResponsePart,
    ToolCallPart,
)

if TYPE_CHECKING:
    from mlxstack.service.parts.text_processor import TextProcessor


class OllamaRenderer(streaming.Renderer):
    """Renders one answer; the time it takes is counted from here on."""

    media_type = streaming.JSON_LINES

    def __init__(self, model: str, text_processor: "TextProcessor") -> None:
        self.model = model
        self._text_processor = text_processor
        self._began = time.perf_counter()
        self._n_calls = 0

    @abstractmethod
    def answer(
        self, content: str, thinking: str = "", calls: tuple[OllamaToolCall, ...] = ()
    ) -> OllamaAnswer:
        """Answer that is not done, or a part of it."""

    def whole(self, replies: tuple[CollectedResponse, ...]) -> OllamaAnswer:
        """Response to a request that does not stream."""
        (reply,) = replies
        calls = tuple(self._call(part) for part in reply.calls if not part.is_cut)
        answer = self.answer(reply.content, reply.reasoning, calls)
        return self._noted(self._finished(answer, reply.ended), reply.notes)

    def loaded(self, reason: str) -> OllamaAnswer:
        """Response to a request without a prompt: a load or unload."""
        return structs.replace(self.answer(""), done=True, done_reason=reason)

    def render(self, index: int, part: ResponsePart) -> Iterator[bytes]:
        match part:
            case KeepAlive():
                yield OLLAMA_HEARTBEAT
            case ReasoningPart():
                yield streaming.json_line(self._noted(self.answer("", part.text), part.notes))
            case ContentPart():
                yield streaming.json_line(self._noted(self.answer(part.text), part.notes))
            case ToolCallPart() if not part.is_cut:
                # Its clients take whole calls only.
                yield streaming.json_line(self.answer("", calls=(self._call(part),)))
            case GenerationFinished():
                last = self._finished(self.answer(""), part)
                yield streaming.json_line(self._noted(last, part.notes))

    def failure(self, error: StackError) -> bytes:
        return streaming.json_line(ollama_error(error, ""))

    def _finished(self, answer: OllamaAnswer, ended: GenerationFinished) -> OllamaAnswer:
        work = ended.work
        return structs.replace(
            answer,
            done=True,
            done_reason=finish_reason(ended, has_calls=False),
            total_duration=nanoseconds(time.perf_counter() - self._began),
            load_duration=nanoseconds(work.queued_s + work.others_s + work.restore_s),
            prompt_eval_count=work.n_prompt,
            prompt_eval_duration=nanoseconds(work.prefill_s),
            eval_count=work.n_generated,
            eval_duration=nanoseconds(work.decode_s),
            loops=work.loops or UNSET,
        )

    def _noted(self, answer: OllamaAnswer, notes: tuple[TokenSampled, ...]) -> OllamaAnswer:
        chosen = logprobs(notes, self._text_processor)
        if chosen is None:
            return answer
        return structs.replace(answer, logprobs=chosen.content)

    def _call(self, part: ToolCallPart) -> OllamaToolCall:
        function = OllamaFunction(part.name, part.arguments, self._n_calls)
        self._n_calls += 1
        return OllamaToolCall(part.id, function)


class OllamaChatRenderer(OllamaRenderer):
    """Renders an answer of /api/chat."""

    def answer(
        self, content: str, thinking: str = "", calls: tuple[OllamaToolCall, ...] = ()
    ) -> OllamaChat:
        message = OllamaReply(content, thinking=thinking or UNSET, tool_calls=calls or UNSET)
        return OllamaChat(
            model=self.model, created_at=rfc3339(time.time()), done=False, message=message
        )


class OllamaPromptRenderer(OllamaRenderer):
    """Renders an answer of /api/generate, which has no tools."""

    def answer(
        self, content: str, thinking: str = "", calls: tuple[OllamaToolCall, ...] = ()
    ) -> OllamaGeneration:
        return OllamaGeneration(
            model=self.model,
            created_at=rfc3339(time.time()),
            done=False,
            response=content,
            thinking=thinking or UNSET,
        )
