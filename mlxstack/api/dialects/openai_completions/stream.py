"""Renders legacy completions, whole and as a stream."""

import time
from collections.abc import Iterator
from uuid import uuid4

from msgspec import UNSET, structs

from mlxstack.api import streaming
from mlxstack.api.dialects.openai_chat.stream import finish_reason
from mlxstack.api.dialects.openai_completions.request_schema import CompletionBody
from mlxstack.api.dialects.openai_completions.response_schema import (
    CompletionChoice,
    TextCompletion,
)
from mlxstack.api.error_bodies import openai_error
from mlxstack.api.response_fields import Stopwatch, legacy, timings, usage
from mlxstack.api.run_generation import n_choices
from mlxstack.core.engine_events import TokenSampled
from mlxstack.core.errors import StackError
from mlxstack.core.response_parts import (
    CollectedResponse,
    ContentPart,
    GenerationFinished,
    KeepAlive,
    ResponsePart,
)
from mlxstack.service.service import Service


class CompletionRenderer(streaming.Renderer):
    """Renders the choices of one answer, `n` for each prompt."""

    def __init__(self, service: Service, model: str, body: CompletionBody, n_prompts: int) -> None:
        self.id = f"cmpl-{uuid4().hex}"
        self.n = n_choices(body.n, service.preset.slots.count)
        self._ended: dict[int, GenerationFinished] = {}
        self._text_processor = service.text_processor
        self._model = model
        self._has_pace = bool(body.timings_per_token)
        self._watches = [Stopwatch(time.monotonic) for _ in range(n_prompts * self.n)]
        self._offsets = [0] * (n_prompts * self.n)
        self._created = int(time.time())
        asked = body.stream_options
        self._has_usage = bool(asked and asked.include_usage)
        self._has_counts = bool(self._has_usage and asked and asked.continuous_usage_stats)

    def whole(self, replies: tuple[CollectedResponse, ...]) -> TextCompletion:
        """Response to a request that does not stream."""
        choices = [
            CompletionChoice(
                text=one.content,
                index=i,
                logprobs=legacy(one.notes, self._text_processor, 0),
                finish_reason=finish_reason(one.ended, has_calls=False),
            )
            for i, one in enumerate(replies)
        ]
        return self._completion(tuple(choices), tuple(one.ended for one in replies))

    def closing(self) -> Iterator[bytes]:
        if self._has_usage:
            ended = tuple(self._ended[i] for i in sorted(self._ended))
            yield streaming.frame(self._completion((), ended))
        yield streaming.DONE

    def failure(self, error: StackError) -> bytes:
        return streaming.frame(openai_error(error, self.id))

    def render(self, index: int, part: ResponsePart) -> Iterator[bytes]:
        self._watches[index].count(part)
        match part:
            case KeepAlive():
                yield streaming.keepalive(part.n_done, part.n_prompt)
            case ContentPart():
                chunk = self._completion((self._choice(part.text, index, part.notes),))
                pace = self._watches[index].timings() if self._has_pace else UNSET
                count = self._watches[index].usage() if self._has_counts else chunk.usage
                yield streaming.frame(structs.replace(chunk, timings=pace, usage=count))
            case GenerationFinished():
                self._ended[index] = part
                reason = finish_reason(part, has_calls=False)
                last = structs.replace(self._choice("", index, part.notes), finish_reason=reason)
                spent = UNSET if self._has_usage else timings(part.work)
                chunk = self._completion((last,))
                count = usage([part]) if self._has_counts else chunk.usage
                yield streaming.frame(structs.replace(chunk, timings=spent, usage=count))

    def _choice(self, text: str, index: int, notes: tuple[TokenSampled, ...]) -> CompletionChoice:
        """Choice of a stream; its text offsets continue the previous part's."""
        noted = legacy(notes, self._text_processor, self._offsets[index])
        if noted is not None:
            self._offsets[index] = noted.text_offset[-1] + len(noted.tokens[-1])
        return CompletionChoice(text, index, noted)

    def _completion(
        self, choices: tuple[CompletionChoice, ...], ended: tuple[GenerationFinished, ...] = ()
    ) -> TextCompletion:
        return TextCompletion(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=choices,
            usage=usage(ended, self.n) if ended else None if self._has_usage else UNSET,
            timings=timings(ended[-1].work) if ended else UNSET,
        )
