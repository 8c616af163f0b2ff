"""Renders legacy completions, whole and as a stream."""

import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from msgspec import structs

from mlxstack.api.dialects.openai_chat.stream import ChunkRenderer, finish_reason
from mlxstack.api.dialects.openai_completions.schema import (
    CompletionBody,
    CompletionChoice,
    TextCompletion,
)
from mlxstack.api.response_fields import legacy
from mlxstack.api.run_generation import n_choices
from mlxstack.core.engine_events import TokenSampled
from mlxstack.core.response_parts import (
    CollectedResponse,
    ContentPart,
    GenerationFinished,
    ResponsePart,
)
from mlxstack.service.service import Service


class CompletionRenderer(ChunkRenderer):
    """Renders the choices of one answer, `n` for each prompt."""

    def __init__(self, service: Service, model: str, body: CompletionBody, n_prompts: int) -> None:
        self.id = f"cmpl-{uuid4().hex}"
        self.n = n_choices(body.n, service.preset.slots.count)
        blank = TextCompletion(id=self.id, created=int(time.time()), model=model, choices=())
        super().__init__(blank, body, n_choices=self.n, n_prompts=n_prompts)
        self._text_processor = service.text_processor
        self._offsets = [0] * (n_prompts * self.n)

    def whole(self, replies: tuple[CollectedResponse, ...]) -> TextCompletion:
        """Response to a request that does not stream."""
        choices = tuple(
            CompletionChoice(
                text=reply.content,
                index=i,
                logprobs=legacy(reply.notes, self._text_processor, 0),
                finish_reason=finish_reason(reply.ended, has_calls=False),
            )
            for i, reply in enumerate(replies)
        )
        totals = self.totals([reply.ended for reply in replies])
        whole: TextCompletion = structs.replace(self.blank, choices=choices, **totals)
        return whole

    def choices(self, index: int, part: ResponsePart) -> Iterator[CompletionChoice]:
        if isinstance(part, ContentPart):
            yield self._choice(part.text, index, part.notes)

    def last(self, index: int, ended: GenerationFinished) -> dict[str, Any]:
        reason = finish_reason(ended, has_calls=False)
        choice = self._choice("", index, ended.notes)
        return {"choices": (structs.replace(choice, finish_reason=reason),)}

    def _choice(self, text: str, index: int, notes: tuple[TokenSampled, ...]) -> CompletionChoice:
        """Choice of a stream; its text offsets continue the previous part's."""
        noted = legacy(notes, self._text_processor, self._offsets[index])
        if noted is not None:
            self._offsets[index] = noted.text_offset[-1] + len(noted.tokens[-1])
        return CompletionChoice(text, index, noted)
