"""llama-server's own completion: a raw prompt, and everything that is known of the answer."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, ClassVar
from uuid import uuid4

from litestar import Response, post
from litestar.params import JSONBody
from litestar.response import Stream
from msgspec import structs

from mlxstack.api import common_fields, sse
from mlxstack.api.common_fields import Fields, Prompt, Prompts
from mlxstack.api.dependencies import TheService
from mlxstack.api.dialects.llama_server.sampling_params import spoken
from mlxstack.api.errors import Dialect, to_stack_error
from mlxstack.api.errors import body as error_body
from mlxstack.api.logprobs import logprobs
from mlxstack.api.openapi import response_spec
from mlxstack.api.parallel_sampling import check_all, interleaved
from mlxstack.api.run_generation import AnyRequest, Parts, answer_stream, answer_whole, later
from mlxstack.api.usage import Stopwatch, timings
from mlxstack.service.generation import AdmittedRequest, admit_text
from mlxstack.service.response_parts import (
    CollectedResponse,
    ContentPart,
    FinishCause,
    GenerationFinished,
    KeepAlive,
    PrefillProgressed,
    ResponsePart,
    TokenLogprob,
)
from mlxstack.service.service import Service

STOP_TYPES = {
    FinishCause.EOS: "eos",
    FinishCause.WORD: "word",
    FinishCause.LENGTH: "limit",
    FinishCause.CONTEXT: "limit",
}


class LlamaCompletionBody(Fields, kw_only=True):
    """POST /completion. A limit of 0 computes the prompt and nothing else.

    A list with a token id is one prompt, any other list holds several.
    """

    least: ClassVar[int] = 0
    prompt: Prompts
    n_probs: int | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None


Answer = dict[str, Any] | list[dict[str, Any]]


@post(["/completion", "/completions"], status_code=200, responses=response_spec(Answer))
async def completion(
    request: AnyRequest, data: JSONBody[LlamaCompletionBody], service: TheService
) -> Response[Answer] | Stream:
    """Continue a text or tokens, or several of them: then the answer is a list."""
    common_fields.only_one(data.n)
    prompts = common_fields.prompts(data.prompt)
    check_all(len(prompts), 1, service)
    n_top = common_fields.top_logprobs(data.n_probs, "n_probs") or None
    options = common_fields.options(data, "", n_top, request)
    options = structs.replace(options, has_progress=bool(data.return_progress))
    name = f"cmpl-{uuid4().hex}"
    orders = [
        await admit_text(service, prompt, structs.replace(options, id=f"{name}-{i}"))
        for i, prompt in enumerate(prompts)
    ]
    shapes = [
        LlamaRenderer(service, order, prompt, data, index)
        for index, (order, prompt) in enumerate(zip(orders, prompts, strict=True))
    ]
    if data.stream:
        return await answer_stream(
            service,
            orders[0],
            lambda first, rest: frames(shapes, first, [rest, *later(service, orders[1:])]),
        )
    return await answer_whole(
        request, service, tuple(orders), lambda replies: _whole(shapes, replies)
    )


class LlamaRenderer:
    """Renders the answer to one order, the prompt number `index`, counting its tokens."""

    def __init__(
        self,
        service: Service,
        order: AdmittedRequest,
        prompt: Prompt,
        body: LlamaCompletionBody,
        index: int,
    ) -> None:
        self._service = service
        self._order = order
        is_text = isinstance(prompt, str)
        self._prompt = prompt if is_text else order.words.decode(order.request.tokens)
        self._index = index
        self._body = body
        self._has_new_line = False
        self._n_predicted = 0
        self._watch = Stopwatch(time.monotonic)

    def whole(self, reply: CollectedResponse) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        self._has_new_line = "\n" in reply.content
        tokens = [note.token for note in reply.notes] if self._body.return_tokens else []
        return {
            **self._final(reply.ended, reply.content, tokens),
            **self._probabilities(reply.notes),
        }

    def render(self, part: ResponsePart) -> list[bytes]:
        self._watch.hear(part)
        match part:
            case KeepAlive():
                return [sse.keepalive(part.n_done, part.n_prompt)]
            case PrefillProgressed():
                return [sse.frame({**self._partial("", ()), **_progress(part)})]
            case ContentPart():
                return [sse.frame(self._content(part))]
            case GenerationFinished():
                return [sse.frame(self._final(part, "", []))]
        return []

    def _content(self, part: ContentPart) -> dict[str, Any]:
        self._has_new_line |= "\n" in part.text
        self._n_predicted += len(part.notes)
        pace = {"timings": self._watch.timings()} if self._body.timings_per_token else {}
        return {**self._partial(part.text, part.notes), **self._probabilities(part.notes), **pace}

    def _partial(self, text: str, notes: tuple[TokenLogprob, ...]) -> dict[str, Any]:
        return {
            "index": self._index,
            "content": text,
            "tokens": [note.token for note in notes],
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": self._n_predicted,
            "tokens_evaluated": len(self._order.request.tokens),
        }

    def _final(self, ended: GenerationFinished, content: str, tokens: list[int]) -> dict[str, Any]:
        work = ended.work
        return {
            "index": self._index,
            "content": content,
            "tokens": tokens,
            "id_slot": ended.slot,
            "stop": True,
            "model": self._service.name,
            "tokens_predicted": work.n_generated,
            "tokens_evaluated": work.n_prompt,
            "generation_settings": spoken(
                self._order.request, self._order.stop, bool(self._body.stream)
            ),
            "prompt": self._prompt,
            "has_new_line": self._has_new_line,
            "truncated": False,
            "stop_type": STOP_TYPES[ended.ending],
            "stopping_word": ended.stop_string or "",
            "tokens_cached": work.n_prompt + max(0, work.n_generated - 1),
            "timings": timings(work),
        }

    def _probabilities(self, notes: tuple[TokenLogprob, ...]) -> dict[str, Any]:
        found = logprobs(notes, self._order.words)
        return {"completion_probabilities": found.content} if found else {}


async def frames(
    shapes: Sequence[LlamaRenderer], first: ResponsePart, replies: Sequence[Parts]
) -> AsyncGenerator[bytes, None]:
    """The stream of all prompts side by side; an error ends it.

    `first` is what the first of `replies` began with.
    """
    try:
        for data in shapes[0].render(first):
            yield data
        async with aclosing(interleaved(replies)) as parts:
            async for index, part in parts:
                for data in shapes[index].render(part):
                    yield data
    except Exception as problem:
        yield sse.frame(error_body(to_stack_error(problem), Dialect.LLAMA, ""))


def _whole(shapes: Sequence[LlamaRenderer], replies: Sequence[CollectedResponse]) -> Answer:
    """As llama-server: the object of a single prompt, a list for several."""
    found = [shape.whole(reply) for shape, reply in zip(shapes, replies, strict=True)]
    return found if len(found) > 1 else found[0]


def _progress(part: PrefillProgressed) -> dict[str, Any]:
    return {
        "prompt_progress": {
            "total": part.n_prompt,
            "cache": part.n_cached,
            "processed": part.n_done,
            "time_ms": part.elapsed_ms,
        }
    }


ROUTES: list[Any] = [completion]
