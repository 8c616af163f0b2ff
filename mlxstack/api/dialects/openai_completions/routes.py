"""Legacy completions: raw prompts, one choice for each."""

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from itertools import chain
from typing import Any
from uuid import uuid4

from litestar import Response, post
from litestar.params import JSONBody
from litestar.response import Stream
from msgspec import UNSET, Struct, UnsetType, structs

from mlxstack.api import common_fields, sse
from mlxstack.api.dependencies import TheService
from mlxstack.api.dialects.openai_chat.request_schema import CompletionBody
from mlxstack.api.dialects.openai_chat.response_schema import FINGERPRINT, finish_reason
from mlxstack.api.errors import Dialect, to_stack_error
from mlxstack.api.errors import body as error_body
from mlxstack.api.logprobs import LegacyLogprobs, legacy
from mlxstack.api.model_names import resolve_model
from mlxstack.api.openapi import response_spec
from mlxstack.api.parallel_sampling import check_all, copies, interleaved, n_choices
from mlxstack.api.run_generation import AnyRequest, Parts, answer_stream, answer_whole, later
from mlxstack.api.usage import OpenAIUsage, Stopwatch, Timings, timings, usage
from mlxstack.core.errors import BadRequest
from mlxstack.service.generation import AdmittedRequest, admit_text
from mlxstack.service.generation_options import GenerationOptions
from mlxstack.service.response_parts import (
    CollectedResponse,
    ContentPart,
    GenerationFinished,
    KeepAlive,
    ResponsePart,
    TokenLogprob,
)
from mlxstack.service.service import Service


class CompletionChoice(Struct, frozen=True):
    """The text that one prompt was given, or a piece of it."""

    text: str
    index: int = 0
    logprobs: LegacyLogprobs | None = None
    finish_reason: str | None = None


class TextCompletion(Struct, frozen=True):
    """The answer, or one frame of its stream."""

    id: str
    created: int
    model: str
    choices: tuple[CompletionChoice, ...]
    system_fingerprint: str = FINGERPRINT
    object: str = "text_completion"
    usage: OpenAIUsage | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET


@post(
    ["/v1/completions", "/v1/batch/completions"],
    status_code=200,
    responses=response_spec(TextCompletion),
)
async def completions(
    request: AnyRequest, data: JSONBody[CompletionBody], service: TheService
) -> Response[TextCompletion] | Stream:
    """Continue one or several texts, whole or as server-sent events."""
    prompts = common_fields.prompts(data.prompt)
    check_all(len(prompts), n_choices(data.n, service.preset.slots.count), service)
    shape = CompletionRenderer(service, resolve_model(service, data.model), data, len(prompts))
    options = _options(data, request)
    orders = [
        await admit_text(service, prompt, structs.replace(options, id=f"{shape.id}-{i}"))
        for i, prompt in enumerate(prompts)
    ]
    groups = [copies(order, shape.n) for order in orders]
    if data.stream:
        return await answer_stream(
            service, orders[0], lambda part, rest: shape.frames(part, rest, groups)
        )
    return await answer_whole(request, service, tuple(chain(*groups)), shape.whole)


def _options(body: CompletionBody, request: AnyRequest) -> GenerationOptions:
    for name in ("echo", "suffix"):
        if getattr(body, name):
            raise BadRequest(f"{name} is not supported", name)
    if body.best_of not in (None, body.n or 1):
        raise BadRequest("best_of is not supported; n gives that many choices", "best_of")
    n_top = None if body.logprobs is None or body.logprobs is False else int(body.logprobs)
    return common_fields.options(body, "", common_fields.top_logprobs(n_top, "logprobs"), request)


class CompletionRenderer:
    """Renders the choices of one answer, `n` for each prompt."""

    def __init__(self, service: Service, model: str, body: CompletionBody, n_prompts: int) -> None:
        self.id = f"cmpl-{uuid4().hex}"
        self.n = n_choices(body.n, service.preset.slots.count)
        self._service = service
        self._words = service.text_processor
        self._model = model
        self._has_pace = bool(body.timings_per_token)
        self._watches = [Stopwatch(time.monotonic) for _ in range(n_prompts * self.n)]
        self._offsets = [0] * (n_prompts * self.n)
        self._created = int(time.time())
        self._has_usage = bool(body.stream_options and body.stream_options.include_usage)

    def whole(self, replies: tuple[CollectedResponse, ...]) -> TextCompletion:
        """The answer to a request that does not stream."""
        choices = [
            CompletionChoice(
                text=one.content,
                index=i,
                logprobs=legacy(one.notes, self._words, 0),
                finish_reason=finish_reason(one.ended, has_calls=False),
            )
            for i, one in enumerate(replies)
        ]
        return self._completion(tuple(choices), tuple(one.ended for one in replies))

    async def frames(
        self, first: ResponsePart, rest: Parts, groups: Sequence[Sequence[AdmittedRequest]]
    ) -> AsyncGenerator[bytes, None]:
        """The stream, prompt by prompt, to [DONE] or to the error that ended it.

        `first` and `rest` are the parts of the first order of the first group.
        """
        ended: dict[int, GenerationFinished] = {}
        try:
            for data in self._render(first, 0, ended):
                yield data
            async with aclosing(self._parts(rest, groups)) as parts:
                async for index, part in parts:
                    for data in self._render(part, index, ended):
                        yield data
            if self._has_usage:
                yield sse.frame(self._completion((), tuple(ended[i] for i in sorted(ended))))
            yield sse.DONE
        except Exception as problem:
            yield sse.frame(error_body(to_stack_error(problem), Dialect.OPENAI, self.id))

    async def _parts(
        self, first: Parts, groups: Sequence[Sequence[AdmittedRequest]]
    ) -> AsyncGenerator[tuple[int, ResponsePart], None]:
        """One prompt after the other, its choices side by side; parts with their index."""
        for at, group in enumerate(groups):
            begun = [first] if at == 0 else []
            replies = [*begun, *later(self._service, group[len(begun) :])]
            async with aclosing(interleaved(replies)) as parts:
                async for choice, part in parts:
                    yield at * self.n + choice, part

    def _render(
        self, part: ResponsePart, index: int, ended: dict[int, GenerationFinished]
    ) -> Iterator[bytes]:
        self._watches[index].hear(part)
        match part:
            case KeepAlive():
                yield sse.keepalive(part.n_done, part.n_prompt)
            case ContentPart():
                said = self._completion((self._choice(part.text, index, part.notes),))
                pace = self._watches[index].timings() if self._has_pace else UNSET
                yield sse.frame(structs.replace(said, timings=pace))
            case GenerationFinished():
                ended[index] = part
                reason = finish_reason(part, has_calls=False)
                last = structs.replace(self._choice("", index, part.notes), finish_reason=reason)
                spent = UNSET if self._has_usage else timings(part.work)
                yield sse.frame(structs.replace(self._completion((last,)), timings=spent))

    def _choice(self, text: str, index: int, notes: tuple[TokenLogprob, ...]) -> CompletionChoice:
        """A piece of the stream; its tokens go on where those of the piece before ended."""
        noted = legacy(notes, self._words, self._offsets[index])
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
            usage=usage(ended, self.n) if ended else UNSET,
            timings=timings(ended[-1].work) if ended else UNSET,
        )


ROUTES: list[Any] = [completions]
